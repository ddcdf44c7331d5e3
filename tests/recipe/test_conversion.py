import pytest

from surefoot.errors import RecipeError
from surefoot.plugins.mindspore.recipe import _RULES, convert
from surefoot.recipe.recipe import load, read, unknown
from surefoot.recipe.yaml import Document, parse

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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: {c: 2}\n", "of none of .*LLaMA-Factory, .*MindSpore Transformers"),
        ("model: {path: x}\ndata: {datasets: [d]}\nstage: sft\n", "this is a recipe already"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, text, said):
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(RecipeError, match=said):
        raise unknown(tmp_path / "file.yaml")


def test_training_from_another_programs_file_says_whose_it_is(tmp_path):
    (tmp_path / "file.yaml").write_text(FILE)
    with pytest.raises(RecipeError, match="of MindSpore Transformers; `surefoot recipe conv"):
        load(tmp_path / "file.yaml")


def test_a_recipe_with_a_key_of_another_program_is_still_a_recipe(tmp_path):
    text = "model: {path: x}\ndata: {datasets: [d]}\ntrain: {output_dir: x}\nstage: sft\n"
    (tmp_path / "file.yaml").write_text(text + "model_name_or_path: y\nrun_mode: train\n")
    with pytest.raises(RecipeError, match="model_name_or_path: unknown key"):
        load(tmp_path / "file.yaml")


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
    assert [*recipe.parallel.axes(8).values()] == [1, 1, 2, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # without a parallel optimizer, ranks of data are copies
            "parallel_config: {data_parallel: 2, model_parallel: 2}",
            {"parallel.dp_replicate": 2, "parallel.dp_shard": 1},
        ),
        (
            "parallel_config: {data_parallel: 2, model_parallel: 2, pipeline_stage: 2, "
            "micro_batch_num: 4, use_seq_parallel: True}\nrunner_config: {batch_size: 1}\n",
            {
                "parallel.pp": 2,
                "parallel.sequence_parallel": True,
                "parallel.num_processes": 8,
                "train.global_batch_size": 8,
            },
        ),
        (
            "runner_config: {batch_size: 2, gradient_accumulation_steps: 8}",
            {"train.global_batch_size": 16},
        ),
        (
            "run_mode: train\ncallbacks:\n  - type: CheckpointMonitor\n"
            "    save_checkpoint_seconds: 90\n    integrated_save: True\n",
            {"stage": "pt", "checkpoint.save_minutes": 1.5, "checkpoint.layout": "full"},
        ),
    ],
)
def test_meshes_batches_and_saves_become_settings(text, expected):
    assert expected.items() <= settings(text).items()


def test_weights_with_their_configuration_beside_are_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    text = f"load_checkpoint: {tmp_path}\npretrained_model_dir: elsewhere\n"
    assert settings(text)["model.path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("load_ckpt_format: ckpt", "theirs.yaml:1:1 load_ckpt_format: 'ckpt': only safetensors"),
        ("load_ckpt_format: ckpt", "mindspore.ckpt_to_safetensors"),
        ("run_mode: eval", "is not a training run; use `surefoot eval RECIPE`"),
        ("run_mode: predict", "is not a training run; `surefoot predict FILE --prompts"),
        ("run_mode: fly", "expected train or finetune"),
        ("seed: x", "seed: expected int, got 'x'"),
        ("parallel_config: {context_parallel: 2}", "2: it is not supported here"),
        ("parallel_config: {data_parallel: 0}", "data_parallel must be a whole number of at least"),
        ("{load_checkpoint: out, resume_training: true}", "name their model with pretra"),
        ("lr_schedule: {type: Fancy}", "type 'Fancy': expected one of CosineWithWarmUpLR"),
        ("lr_schedule: {total_steps: 9}", "total_steps 9: a schedule always runs over the steps"),
        ("optimizer: {type: Muon}", "'Muon': only AdamW is supported"),
        ("optimizer: {betas: 3}", "betas: expected two numbers, got 3"),
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
    assert "convert --to huggingface` writes only the weights" in second
    assert "checkpoints are always in output_dir" in third


def test_a_training_goes_on_from_what_mindspore_saved(tmp_path):
    text = "load_checkpoint: out/checkpoint\npretrained_model_dir: model\nresume_training: "
    found = settings(text + "True\n")
    assert found["model.path"] == "model"
    assert found["checkpoint.resume"] == "out/checkpoint"
    found = settings(text + "llama_rank_3-2_10.safetensors\n")
    assert found["checkpoint.resume"] == "out/checkpoint/rank_0/llama_rank_0-2_10.safetensors"
    (tmp_path / "config.json").write_text("{}")
    found = settings(f"load_checkpoint: {tmp_path}\nresume_training: True\n")
    assert found["model.path"] == found["checkpoint.resume"] == str(tmp_path)


def test_the_optimizer_and_its_schedule_are_the_same_here():
    text = "optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, weight_decay: 0.1}\n"
    text += "lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-4, lr_end: 1.e-5, "
    text += "warmup_ratio: 0.02, warmup_steps: 7, total_steps: -1}\n"
    assert settings(text) == {
        "optim.adamw.beta1": 0.9,
        "optim.adamw.beta2": 0.95,
        "optim.adamw.epsilon": 1e-8,
        "optim.adamw.weight_decay": 0.1,
        "optim.adamw.schedule": "cosine",
        "optim.adamw.learning_rate": 1e-4,
        "optim.adamw.min_lr_ratio": pytest.approx(0.1),
        "optim.adamw.warmup_ratio": 0.02,
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1", "no train_dataset: set data.datasets to the training data"),
        (
            "train_dataset: {data_loader: {type: MindDataset, dataset_dir: x}}",
            "train_dataset: MindDataset is not converted; set data.datasets to the rows",
        ),
        (
            "train_dataset: {data_loader: {type: HFDataLoader, path: a/b, handler: [{type: X}]}}",
            "HFDataLoader of a/b is not converted; set data.datasets to the rows",
        ),
    ],
)
def test_what_is_to_be_added_is_told(text, told):
    advice, *_ = convert(parse(text, "theirs.yaml")).advice
    assert told in advice


def test_a_model_that_is_named_beside_the_file_counts(tmp_path):
    """The resume files of the documentation name no model."""
    (tmp_path / "theirs.yaml").write_text(
        "run_mode: finetune\nload_checkpoint: out/checkpoint\nresume_training: True\n"
    )
    with pytest.raises(RecipeError, match=r"or model.path=MODEL behind the file"):
        load(tmp_path / "theirs.yaml")
    recipe = load(
        tmp_path / "theirs.yaml",
        ["model.path=base", "data.datasets=[mine]", f"train.output_dir={tmp_path / 'run'}"],
    )
    assert recipe.model.path == "base"
    assert str(recipe.checkpoint.resume) == "out/checkpoint"
    assert [str(name) for name in recipe.data.datasets] == ["mine"]


def test_a_file_without_a_model_or_data_runs_only_with_both(tmp_path):
    (tmp_path / "theirs.yaml").write_text("run_mode: finetune\nseed: 7\n")
    for overrides in ([], ["model.path=base"], ["data.datasets=[mine]"]):
        with pytest.raises(RecipeError, match="to be completed"):
            load(tmp_path / "theirs.yaml", overrides)
    both = ["model.path=base", "data.datasets=[mine]", "train.output_dir=run"]
    assert load(tmp_path / "theirs.yaml", both).train.seed == 7


def test_pretraining_begins_with_new_weights_and_asks_for_their_configuration(tmp_path):
    """Their file for pretraining names no weights; what the model is, is in their own classes."""
    done = convert(parse("run_mode: train\nload_checkpoint: ''\n", "theirs.yaml"))
    assert done.settings == {"stage": "pt", "model.new_weights": True}
    assert "config.json, tokenizer, and no weights" in done.advice[-1]
    done = convert(parse("run_mode: train\nload_checkpoint: w\n", "theirs.yaml"))
    assert done.settings == {"stage": "pt", "model.path": "w"}
    (tmp_path / "theirs.yaml").write_text("run_mode: train\n")
    words = ["model.path=base", "data.datasets=[mine]", "train.output_dir=run"]
    assert load(tmp_path / "theirs.yaml", words).model.new_weights


ODD = ([1], {"a": 1}, "x", 3, True, None)


def test_a_value_of_any_type_for_any_key_is_a_setting_or_refused_with_its_line():
    for key in ("parallel_config", "lr_schedule", "optimizer", "runner_config", *_RULES):
        section, _, inner = key.partition(".")
        for value in ODD:
            is_nested = inner and section != "callbacks"
            content = {section: {inner: value}} if is_nested else {key: value}
            try:
                convert(Document(content, "theirs.yaml"))
            except RecipeError as error:
                assert str(error).startswith("theirs.yaml"), (key, value)
