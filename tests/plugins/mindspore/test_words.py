"""The command lines of run_mindformer.py, in their words."""

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe.prediction import load, read_program
from surefoot.recipe.recipe import convert

FILE = """\
run_mode: finetune
output_dir: out
load_checkpoint: ''
parallel_config: {data_parallel: 8, model_parallel: 1}
runner_config: {epochs: 9, batch_size: 2}
"""
TRAIN = "--run_mode train --load_checkpoint {dir}/w --register_path research/qwen2 --epochs 3"
TRAIN += " --use_parallel True --data_parallel=1 --train_dataset_dir {dir}/rows.jsonl"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(FILE)
    return path


def test_a_training_is_the_file_with_the_words_in_it(config, tmp_path):
    words = TRAIN.format(dir=tmp_path).split()
    converted = convert([*words, "--config", str(config), "train.max_steps=4"])
    data = converted.document.data
    assert converted.is_complete
    assert data["stage"] == {"pt": {}}
    assert data["model"] == {"path": f"{tmp_path}/w"}
    assert data["data"]["datasets"] == [f"{tmp_path}/rows.jsonl"]
    expected = {"num_epochs": 3, "micro_batch_size": 2, "global_batch_size": 2, "max_steps": 4}
    assert expected.items() <= data["train"].items()
    assert "parallel" not in data
    assert "not used: register_path" in converted.notes


def test_a_prediction_has_its_prompts(config):
    words = ["--run_mode", "predict", "--load_checkpoint", "w", "--use_parallel", "False"]
    words = [str(config), *words, "--predict_data", "I love", "and 1=1", "generate.batch_size=3"]
    prediction = load("--config", words)
    assert (prediction.model.path, prediction.generate.batch_size) == ("w", 3)
    assert read_program("--config", words)[2] == ["I love", "and 1=1"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--run_mod train", "--run_mod is no argument of run_mindformer.py (did you mean --run_m"),
        ("--seed 1 --seed 2", "--seed occurs twice"),
        ("--seed", "--seed: expected a value"),
        ("--seed 1 2", "'2' belongs to no argument"),
        ("--epochs x", "--epochs: runner_config.epochs: expected int, got 'x'"),
        ("--run_mode eval", "--run_mode: run_mode: 'eval' is not a training run"),
    ],
)
def test_a_word_that_is_wrong_is_named(config, words, problem):
    with pytest.raises(RecipeError) as error:
        convert(["--config", str(config), *words.split()])
    assert problem in str(error.value)


def test_words_for_training_are_none_for_responses(config):
    with pytest.raises(RecipeError, match="nor are these words for responses"):
        load("--config", [str(config)])
