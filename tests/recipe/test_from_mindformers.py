import pytest

from surefoot.errors import RecipeError
from surefoot.recipe.from_mindformers import convert
from surefoot.recipe.recipe import read
from surefoot.recipe.yaml import parse

FILE = """\
seed: 7
output_dir: ./output
run_mode: finetune
load_checkpoint: ""
pretrained_model_dir: Qwen/Qwen2.5-0.5B
load_ckpt_format: safetensors
auto_trans_ckpt: True
remove_redundancy: True
resume_training: False
use_parallel: True
parallel:
  enable_parallel_optimizer: True
  full_batch: True
parallel_config:
  data_parallel: 2
  model_parallel: 4
  pipeline_stage: 1
  micro_batch_num: 16
  vocab_emb_dp: False
runner_config:
  epochs: 2
  batch_size: 3
  sink_mode: True
callbacks:
  - type: MFLossMonitor
    per_print_times: 5
  - type: CheckpointMonitor
    prefix: qwen
    save_checkpoint_steps: 50
    keep_checkpoint_max: 4
    integrated_save: False
    async_save: thread
    checkpoint_format: safetensors
    remove_redundancy: True
context:
  mode: 0
"""


def settings(text):
    return convert(parse(text, "theirs.yaml")).settings


def test_a_file_becomes_the_settings_of_a_recipe():
    done = convert(parse(FILE, "theirs.yaml"))
    assert done.settings == {
        "train.seed": 7,
        "train.output_dir": "./output",
        "stage": "sft",
        "model.path": "Qwen/Qwen2.5-0.5B",
        "parallel.num_processes": 8,
        "parallel.tp": 4,
        "parallel.dp_shard": 2,
        "train.num_epochs": 2,
        "train.micro_batch_size": 3,
        "train.global_batch_size": 6,
        "train.log_steps": 5,
        "checkpoint.save_steps": 50,
        "checkpoint.keep": 4,
        "checkpoint.layout": "distributed",
        "checkpoint.async_save": True,
    }
    assert done.left == ["parallel.full_batch", "context.mode"]


def test_what_comes_out_is_a_recipe_once_there_is_data():
    nested = convert(parse(FILE, "theirs.yaml")).nested()
    recipe = read({**nested, "data": {"datasets": ["mine"], "dataset_dir": "data"}})
    assert recipe.train.global_batch_size == 6
    assert recipe.parallel.axes(8) == (1, 1, 2, 4)


def test_without_a_parallel_optimizer_the_data_parallel_ranks_are_copies():
    found = settings("parallel_config: {data_parallel: 2, model_parallel: 2}")
    assert found["parallel.dp_replicate"] == 2
    assert found["parallel.dp_shard"] == 1


def test_stages_and_parts_of_the_sequence_are_axes_here_too():
    text = "parallel_config: {data_parallel: 2, model_parallel: 2, pipeline_stage: 2, "
    text += "micro_batch_num: 4, use_seq_parallel: True}\nrunner_config: {batch_size: 1}\n"
    found = settings(text)
    assert found["parallel.pp"] == 2
    assert found["parallel.sequence_parallel"] is True
    assert found["parallel.num_processes"] == 8
    assert found["train.global_batch_size"] == 8


def test_batches_add_up_over_accumulation():
    text = "runner_config: {batch_size: 2, gradient_accumulation_steps: 8}\n"
    assert settings(text)["train.global_batch_size"] == 16


def test_pretraining_and_seconds_and_whole_saves():
    text = "run_mode: train\ncallbacks:\n  - type: CheckpointMonitor\n"
    text += "    save_checkpoint_seconds: 90\n    integrated_save: True\n"
    found = settings(text)
    assert found["stage"] == "pt"
    assert found["checkpoint.save_minutes"] == 1.5
    assert found["checkpoint.layout"] == "full"


def test_weights_with_their_configuration_beside_are_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    text = f"load_checkpoint: {tmp_path}\npretrained_model_dir: elsewhere\n"
    assert settings(text)["model.path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("load_ckpt_format: ckpt", "theirs.yaml:1:1 load_ckpt_format: 'ckpt': only safetensors"),
        ("load_ckpt_format: ckpt", "mindspore.ckpt_to_safetensors"),
        ("run_mode: predict", "is no training; take `surefoot chat FOLDER`"),
        ("run_mode: fly", "expected train, finetune, predict or eval"),
        ("seed: x", "seed: expected int, got 'x'"),
        ("src_strategy_path_or_dir: s", "strategy files are looked for in `strategy` beside"),
        ("parallel_config: {context_parallel: 2}", "2: it is not supported here"),
        ("parallel_config: {data_parallel: 0}", "data_parallel must be a whole number of at least"),
        ("{load_checkpoint: out, resume_training: true}", "moments of MindSpore's optimizer are"),
        (
            "{load_checkpoint: w, pretrained_model_dir: m}",
            "convert w MODEL --to huggingface --base",
        ),
        ("- a", "expected the keys of MindSpore Transformers"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_reason(text, problem):
    with pytest.raises(RecipeError) as caught:
        settings(text)
    assert problem in str(caught.value)


def test_every_refusal_is_told_at_once_with_its_line():
    text = "callbacks:\n  - type: CheckpointMonitor\n    checkpoint_format: ckpt\n"
    text += "    save_network_params: True\n    directory: elsewhere\n"
    with pytest.raises(RecipeError) as caught:
        settings(text)
    first, second, third = str(caught.value).splitlines()
    assert "checkpoint_format" in first
    assert "convert --to huggingface` writes the weights alone" in second
    assert "checkpoints lie in output_dir" in third
