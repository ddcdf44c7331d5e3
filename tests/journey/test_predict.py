"""A file of prompts is answered by one process and by several, the command starting them."""

import json
import shutil

import pytest

from folders import save_data, save_model, save_recipe
from project import surefoot
from surefoot.plugins.mindspore.target import MindSporeFolder
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.use.exporting.conversion import convert

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.3}
SAMPLED = ("generate.max_new_tokens=5", "generate.do_sample=true", "generate.batch_size=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    save_model(folder / "base", "qwen2", **SIZES)
    (folder / "q.txt").write_text("Hi\nWhat is 1 plus 1?\nA long story\n")
    wanted = MindSporeFolder(
        layout="distributed", parallel_config=ParallelConfig(2, 2), names="legacy-fused"
    )
    convert(folder / "base", folder / "theirs", wanted)
    for name in ("config.json", "tokenizer.json"):  # what MindSpore's ranks have nothing of
        (folder / "theirs" / name).unlink()
    return folder


def predict(folder, output, path, *overrides, code=0):
    told = ("--prompts", folder / "q.txt", "--output", output)
    found, out, err = surefoot("predict", path, *overrides, *told)
    assert found == code, err
    return err if code else out


@pytest.fixture(scope="module")
def one(folder):
    predict(folder, folder / "one.jsonl", folder / "base", *SAMPLED)
    return (folder / "one.jsonl").read_text()


@pytest.mark.parametrize(
    "parallel",
    [
        "tp=2",
        pytest.param("dp_shard=2", marks=pytest.mark.proof),
        pytest.param("num_processes=2", marks=pytest.mark.proof),
    ],
)
def test_two_processes_write_what_one_writes(parallel, folder, one, tmp_path):
    output = tmp_path / "a.jsonl"
    out = predict(folder, output, folder / "base", *SAMPLED, f"parallel.{parallel}")
    assert output.read_text() == one
    assert out.splitlines() == [f"{output}: 3 answers (3 truncated at generate.max_new_tokens)"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_texts_are_answered_by_two_processes_and_printed_once(folder, one):
    texts = ("--prompt", "Hi", "--prompt", "What is 1 plus 1?", "--prompt", "A long story")
    code, out, err = surefoot("predict", folder / "base", *SAMPLED, *texts, "parallel.tp=2")
    assert code == 0, err
    answers = [json.loads(line)["answer"] for line in one.splitlines()]
    assert out.split("\n")[:-1] == [answer.replace("\n", "\\n") for answer in answers]


THEIRS = """\
run_mode: predict
load_checkpoint: {weights}
pretrained_model_dir: {model}
load_ckpt_format: safetensors
auto_trans_ckpt: True
use_parallel: True
parallel_config: {{data_parallel: 1, model_parallel: 2, pipeline_stage: 1}}
predict_batch_size: 2
model: {{model_config: {{type: LlamaConfig, do_sample: True, top_k: 0, max_new_tokens: 5}}}}
"""


@pytest.mark.parametrize("is_described", [True, False])
def test_the_file_of_mindspore_answers_from_its_ranks_without_a_merge(
    is_described, folder, one, tmp_path
):
    """Their four workflows differ in the form of the weights; here they are by rank, with strategy
    files and without."""
    weights = tmp_path / "distributed"
    shutil.copytree(folder / "theirs", weights)
    if not is_described:
        shutil.rmtree(weights / "strategy")
    (tmp_path / "theirs.yaml").write_text(THEIRS.format(weights=weights, model=folder / "base"))
    predict(folder, tmp_path / "a.jsonl", tmp_path / "theirs.yaml")
    assert (tmp_path / "a.jsonl").read_text() == one


def test_more_processes_than_heads_are_one_error(folder, tmp_path):
    save_model(tmp_path / "odd", hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    err = predict(folder, tmp_path / "a.jsonl", tmp_path / "odd", "parallel.tp=2", code=2)
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert "parallel.tp: 2 ranks cannot share the 3 attention heads of the model evenly" in line
    assert json.loads((tmp_path / "odd" / "config.json").read_text())["num_attention_heads"] == 3
    assert not (tmp_path / "a.jsonl").exists()


def test_an_evaluation_is_spread_as_the_command_says_not_as_the_training_was(folder, tmp_path):
    data = {"dataset_dir": str(save_data(tmp_path / "data"))}
    trained_on = {"num_processes": 4, "dp_shard": 4}
    recipe = save_recipe(
        tmp_path, model={"path": str(folder / "base")}, data=data, parallel=trained_on
    )
    found = []
    for overrides in ((), ("parallel.tp=2",)):
        told = ("eval", recipe, *overrides, "--model", "base", "--json")
        code, out, err = surefoot(*told, "--output", tmp_path / f"{len(found)}.jsonl")
        assert code == 0, err
        found.append(json.loads(out))
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=1e-5)
    one, two = ((tmp_path / f"{i}.jsonl").read_text() for i in range(2))
    assert one == two
