"""Files of TRL, axolotl and transformers' Trainer as recipes; their defaults are never lost."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from surefoot.cli.main import main
from surefoot.errors import RecipeError
from surefoot.plugins.migrate.arguments import ARGUMENTS
from surefoot.plugins.migrate.conversion import convert_trainer
from surefoot.plugins.migrate.other_trainers import PROGRAMS
from surefoot.recipe.recipe import IMPORTERS, Recipe, convert, load, load_converted
from surefoot.recipe.yaml import parse
from surefoot.schema import dotted, paths

FIELDS = json.loads((Path(__file__).parent / "trainers" / "fields.json").read_text())
TRL = [name for name in PROGRAMS if name.startswith("trl-")]
LEAST = {"model_name_or_path": "m/m", "dataset_name": "d/d", "output_dir": "o"}
OWN = {
    "trl-sft": {"completion_only_loss": True},
    "trl-grpo": {"reward_model_name_or_path": "r/r"},
    "axolotl": {
        "base_model": "m/m",
        "datasets": [{"path": "d/d", "type": "chat_template"}],
        "output_dir": "o",
        "learning_rate": 1e-4,
        "warmup_steps": 5,
    },
    "transformers": {"output_dir": "o"},
}
STAGES = {"trl-dpo": "dpo", "trl-kto": "kto", "trl-reward": "rm", "trl-grpo": "grpo"}


def translation(name, **values):
    least = LEAST if name.startswith("trl-") else {}
    content = {**least, **OWN.get(name, {}), **values}
    document = parse(json.dumps(content, indent=0), "theirs.yaml")
    return convert_trainer(PROGRAMS[name], document, (), {})


def recipe(name, **values):
    """Also of a file that has to be completed."""
    return load_converted(dataclasses.replace(translation(name, **values), is_complete=True))


@pytest.mark.parametrize("name", TRL)
def test_no_field_of_trl_is_missing_and_defaults_are_theirs(name):
    source = PROGRAMS[name]
    recorded = {**FIELDS[name], **FIELDS["model"], **FIELDS["script"]}
    recorded |= FIELDS["grpo_script"] if name == "trl-grpo" else {}
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert not (recorded.keys() | theirs) - source.arguments.keys() - {"do_train"}
    for field, default in recorded.items():
        known = source.arguments[field]
        is_listed = known.kind == "any" and known.outcome in ("ignored", "refused")
        assert not known.refuses(default), field
        is_rate = field == "learning_rate"
        assert is_listed or known.default == (float(default) if is_rate else default), field


def test_the_command_line_knows_every_source():
    assert tuple(PROGRAMS) == (*TRL, "transformers", "axolotl")
    assert PROGRAMS.keys() < IMPORTERS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_counterpart_exists(name):
    known = {dotted(path) for path in paths(Recipe)}
    sections = {path.rsplit(".", n)[0] for path in known for n in range(1, path.count(".") + 1)}
    for setting, argument in PROGRAMS[name].arguments.items():
        if argument.outcome == "is" and "." not in argument.settings[0]:
            assert argument.settings[0] in ARGUMENTS
        else:
            assert set(argument.settings) <= {*known, *sections}, setting


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_least_file_is_a_recipe(name):
    found = recipe(name)
    assert str(found.train.output_dir) == "o"
    assert type(found.stage).__name__.lower() == STAGES.get(name, "sft")


# Defaults, which must be in the recipe wherever ours differ


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("trl-sft", 2e-05),
        ("trl-dpo", 1e-06),
        ("trl-kto", 1e-06),
        ("trl-reward", 0.0001),
        ("trl-grpo", 1e-06),
        ("transformers", 5e-05),
    ],
)
def test_defaults_are_written(name, rate):
    found = recipe(name)
    assert found.optim.learning_rate == rate
    assert found.optim.schedule == "linear"
    is_trl = name != "transformers"
    assert found.train.log_steps == (10 if is_trl else 500)
    assert found.model.gradient_checkpointing == ("full" if is_trl else "none")
    assert found.train.precision == ("bf16" if is_trl else "fp32")
    assert found.train.num_epochs == 3 and found.checkpoint.save_steps == 500
    if name in ("trl-sft", "trl-dpo", "trl-kto", "trl-reward"):
        assert found.data.cutoff_len == 1024
        assert found.train.global_batch_size == 8
    assert found.data.shuffle == (name != "trl-kto")  # sequential there


def test_former_names_nulls_and_true_are_read():
    former = recipe("trl-sft", evaluation_strategy="epoch", fsdp=True)
    assert former.train.eval_epoch and len(former.data.eval_datasets) == 1
    nulls = recipe("trl-grpo", num_generations=None, per_device_train_batch_size=None)
    assert (nulls.stage.group_size, nulls.train.global_batch_size) == (8, 1)
    assert recipe("axolotl", lr_scheduler=None).optim.schedule == "cosine"
    with pytest.raises(RecipeError, match="accumulation_steps: must be at least 1, got 0"):
        recipe("trl-grpo", gradient_accumulation_steps=0)


def test_fp16_and_an_explicit_value_have_precedence():
    assert recipe("trl-sft", fp16=True).train.precision == "fp16"
    assert recipe("trl-sft", bf16=False).train.precision == "fp32"
    assert recipe("trl-sft", gradient_checkpointing=False).model.gradient_checkpointing == "none"
    assert recipe("trl-dpo", learning_rate=3e-6).optim.learning_rate == 3e-6


def test_axolotls_defaults_are_written():
    found = recipe("axolotl")
    assert (found.optim.schedule, found.train.num_epochs) == ("cosine", 1)
    assert (found.data.cutoff_len, found.data.on_too_long) == (512, "drop")
    assert (found.train.global_batch_size, found.checkpoint.keep) == (1, 4)
    assert found.checkpoint.save_epoch and found.checkpoint.save_steps is None
    assert found.train.precision == "bf16" and found.model.gradient_checkpointing == "none"


def test_loras_dropout_is_off_where_trl_disables_all_dropout():
    told = {"use_peft": True, "lora_target_modules": "all-linear"}
    for name, dropout in (("trl-sft", 0.05), ("trl-dpo", 0.0), ("trl-kto", 0.0)):
        lora = recipe(name, **told).method
        assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (16, 32, dropout, ("all",))
    kept = recipe("trl-dpo", **told, disable_dropout=False, lora_dropout=0.1)
    assert kept.method.dropout == 0.1


@pytest.mark.parametrize(
    ("values", "trains", "masks"),
    [
        ({"completion_only_loss": True}, False, True),
        ({"completion_only_loss": False}, True, False),
        ({"assistant_only_loss": True}, False, False),
    ],
)
def test_what_is_trained_on(values, trains, masks):
    data = recipe("trl-sft", **{"completion_only_loss": None, **values}).data
    assert (data.train_on_prompt, data.mask_history) == (trains, masks)


def test_preferences():
    both = recipe("trl-dpo", loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1])
    assert dict(both.stage.losses) == {"sigmoid": 0.8, "bco_pair": 0.2}
    assert both.stage.sft_weight == 1
    robust = recipe("trl-dpo", loss_type="robust", label_smoothing=0.1, beta=0.2)
    assert (robust.stage.loss_type, robust.stage.label_smoothing) == ("robust", 0.1)
    ignored = translation("trl-dpo", label_smoothing=0.1)  # sigmoid does not read it in TRL
    assert "label_smoothing" not in ignored.document.data["stage"]["dpo"]
    assert any("label_smoothing has no effect" in line for line in ignored.notes)


@pytest.mark.parametrize(
    ("loss", "surrogate", "average"),
    [
        ("grpo", "clip", "responses"),
        ("dapo", "clip", "tokens"),
        ("dr_grpo", "clip", "max_new_tokens"),
        ("sapo", "sapo", "responses"),
    ],
)
def test_rewarded_training(loss, surrogate, average):
    values = {"loss_type": loss, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    found = recipe("trl-grpo", **values, num_generations=4, scale_rewards="none")
    stage = found.stage
    assert (stage.surrogate, stage.average_over, stage.advantage) == (surrogate, average, "dr_grpo")
    assert (stage.group_size, stage.mini_batches, stage.passes) == (4, 2, 1)
    assert found.train.global_batch_size == 8 * 8 // 4  # prompts of a window
    assert stage.max_new_tokens == 512
    assert not stage.mask_truncated_completions
    assert recipe("trl-grpo", mask_truncated_completions=True).stage.mask_truncated_completions


def test_datasets_keep_their_splits():
    found = recipe("trl-sft", eval_strategy="steps", eval_steps=5, dataset_config="en")
    (train,), (held,) = found.data.datasets, found.data.eval_datasets
    assert train.source == {
        "name": "d_train",
        "hf_hub_url": "d/d",
        "subset": "en",
        "split": "train",
    }
    assert held.source["split"] == "test"


REFUSED = [
    ("trl-sft", {"completion_only_loss": None}, "completion_only_loss: is not set, so TRL trains"),
    ("trl-sft", {"use_peft": True}, "lora_target_modules: unset, PEFT chooses by architecture"),
    ("trl-sft", {"dtype": "auto"}, "dtype: auto: the type that is trained is not known"),
    ("trl-sft", {"packing_strategy": "wrapped"}, "examples never mix"),
    ("trl-sft", {"loss_type": "dft"}, "'dft' is not supported: the loss is cross entropy"),
    ("trl-sft", {"max_length": None}, "max_length: null truncates nothing"),
    ("trl-sft", {"beta": 0.1}, "beta: no argument of TRL's SFTConfig"),
    ("trl-sft", {"learning_rat": 0.1}, "did you mean learning_rate?"),
    ("trl-dpo", {"loss_type": "aot"}, "loss_type: 'aot' is not supported"),
    ("trl-dpo", {"f_divergence_type": "js_divergence"}, "write reverse_kl"),
    ("trl-grpo", {"reward_funcs": ["accuracy_reward"]}, "write stage.grpo.reward"),
    ("trl-grpo", {"use_vllm": True}, "use_vllm: true is not supported"),
    ("trl-grpo", {"loss_type": "bnpo"}, "loss_type: 'bnpo' is not supported"),
    ("trl-grpo", {"top_p": 0.9}, "top_p: 0.9 is not supported"),
    ("axolotl", {"warmup_steps": None}, "warmup_steps: is not set, so axolotl takes 3 %"),
    ("axolotl", {"datasets": [{"path": "d", "type": "alpaca"}]}, "type: alpaca has a prompt"),
    ("axolotl", {"rl": "dpo"}, "rl: 'dpo' is not supported"),
    ("axolotl", {"unfrozen_parameters": ["x"]}, "unfrozen_parameters: no argument of axolotl"),
    ("transformers", {"push_to_hub": True}, "hub_model_id: is missing; name the repository"),
    ("transformers", {"optim": "sgd"}, "optim: 'sgd' is not supported"),
]


@pytest.mark.parametrize(("name", "values", "says"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(name, values, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        translation(name, **values)


def test_axolotls_trackers_are_those_of_its_projects():
    found = recipe("axolotl", wandb_project="p", wandb_name="r", wandb_mode="offline").train
    assert (found.report_to, found.project, found.run_name) == (("wandb",), "p", "r")
    assert found.report_offline
    assert recipe("axolotl", wandb_project="p", use_wandb=False).train.report_to == ()
    found = recipe("axolotl", mlflow_experiment_name="e", use_tensorboard=True).train
    assert (found.report_to, found.project) == (("tensorboard", "mlflow"), "e")


def test_an_error_names_the_line(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: m\nuse_vllm: true\n")
    with pytest.raises(RecipeError, match=r"sft\.yaml:2:1 use_vllm"):
        convert([str(path)], "trl-grpo")


def test_the_command_prints_a_recipe(tmp_path):
    path = tmp_path / "training_args.json"
    path.write_text(json.dumps({"output_dir": "o", "per_device_train_batch_size": 4, "seed": 3}))
    words = ["recipe", "convert", str(path), "--from", "transformers", "model.path=m/m"]
    done = CliRunner().invoke(main, [*words, "data.datasets=[mine]"])
    assert done.exit_code == 0, done.output
    assert "settings of transformers' TrainingArguments as a recipe" in done.stderr
    found = parse(done.stdout, "out.yaml").data
    assert found["model"]["path"] == "m/m" and found["data"]["datasets"] == ["mine"]
    assert found["train"]["seed"] == 3


WHOSE = [
    ({**LEAST, "num_generations": 4, "top_p": 0.5}, "top_p: 0.5 is not supported"),
    ({"base_model": "m", "sequence_len": 9, "adapter": "lora"}, "learning_rate: is missing"),
    (
        {"model_name_or_path": "m", "per_device_train_batch_size": 4, "learning_rate": 1e-4},
        r"of TRL, of transformers' Trainer or of LLaMA-Factory; .*add do_train: true",
    ),
    ({"actor_rollout_ref": {}, "data": {}, "trainer": {}}, "a file of verl, not a recipe"),
    ({"model": {"_component_": "torchtune.models.llama3"}}, "a file of torchtune, not a recipe"),
]


@pytest.mark.parametrize(("settings", "words"), WHOSE)
def test_a_file_of_another_program_is_called_what_it_is(tmp_path, settings, words):
    path = tmp_path / "file.yaml"
    path.write_text(json.dumps(settings))
    for opened in (load, lambda path: convert([str(path)])):
        with pytest.raises(RecipeError, match=words):
            opened(path)


def test_a_file_whose_program_is_certain_is_read_as_a_recipe(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(json.dumps({**LEAST, "completion_only_loss": True, "max_length": 77}))
    assert load(path).data.cutoff_len == 77
    assert load(path, ["train.seed=3"]).train.seed == 3
    path.write_text(json.dumps({"learning_rate": 1e-4, "output_dir": "o"}))
    with pytest.raises(RecipeError, match=r"--from trl-sft\|trl-dpo"):
        load(path)
    with pytest.raises(RecipeError, match="to be completed"):
        load_converted(convert([str(path)], "transformers"))
    with pytest.raises(RecipeError, match=r"--from trl: expected one of .*, trl-sft"):
        convert([str(path)], "trl")
