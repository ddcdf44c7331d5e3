"""Files of TRL, axolotl and transformers' Trainer as recipes; their defaults are never lost."""

import dataclasses
import json
from pathlib import Path

import pytest
import transformers

import commands
from surefoot.errors import RecipeError
from surefoot.plugins.migrate.arguments import ARGUMENTS
from surefoot.plugins.migrate.conversion import convert_trainer
from surefoot.plugins.migrate.other_trainers import PROGRAMS
from surefoot.recipe.recipe import IMPORTERS, Recipe, convert, load, load_converted
from surefoot.recipe.yaml import parse
from surefoot.schema import dotted, paths

from . import cases

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


@pytest.mark.parametrize("case", cases.of(Path(__file__).parent / "trainers" / "cases.yaml"))
def test_a_file_means_what_its_case_says(case):
    def translate(case):
        found = translation(case["from"], **case["file"])
        # a file that has to be completed is a recipe, too
        return dataclasses.replace(found, is_complete=True)

    cases.check(case, translate)


def test_an_error_names_the_line(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: m\nuse_vllm: true\n")
    with pytest.raises(RecipeError, match=r"sft\.yaml:2:1 use_vllm"):
        convert([str(path)], "trl-grpo")


def test_the_command_prints_a_recipe(tmp_path):
    path = tmp_path / "training_args.json"
    path.write_text(json.dumps({"output_dir": "o", "per_device_train_batch_size": 4, "seed": 3}))
    words = ["recipe", "convert", str(path), "--from", "transformers", "model.path=m/m"]
    done = commands.run(*words, "data.datasets=[mine]")
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


def test_arguments_as_they_write_themselves_are_read_from_a_file(tmp_path):
    arguments = transformers.TrainingArguments(output_dir="o", learning_rate=3e-4, hub_token="t")
    (file := tmp_path / "args.json").write_text(arguments.to_json_string())
    assert "<HUB_TOKEN>" in file.read_text()
    recipe = commands.ok("recipe", "convert", "--from", "transformers", file)
    assert "learning_rate: 0.0003" in recipe
