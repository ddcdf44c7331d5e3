import re
from dataclasses import dataclass
from typing import Annotated, Protocol

import pytest

from surefoot.errors import RecipeError
from surefoot.plugins.migrate.importers import hints_by_key
from surefoot.recipe.overrides import override
from surefoot.recipe.recipe import Recipe
from surefoot.recipe.recipe import read as read_recipe
from surefoot.recipe.yaml import Document, parse
from surefoot.schema import Variants, paths, read


class Method(Protocol):
    pass


@dataclass(frozen=True, kw_only=True)
class Full:
    pass


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int = 8
    targets: tuple[str, ...] = ("all",)


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 1
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Root:
    train: Train = Train()
    method: Annotated[Method, Variants({"full": Full, "lora": Lora})] = Full()


def build(text, *overrides):
    document = override(Root, parse(text, "r.yaml"), overrides)
    return read(Root, document.data, fail=document.error)


def refused(text, *overrides):
    with pytest.raises(RecipeError) as caught:
        build(text, *overrides)
    return str(caught.value)


def test_a_value_is_read_as_yaml():
    assert build("", "train.steps=5").train.steps == 5
    assert build("", "train.name=5e-5 x").train.name == "5e-5 x"
    assert build("", "train.name='5'").train.name == "5"
    assert build("", "method.lora.targets=[a, b]").method.targets == ("a", "b")
    assert build("", "method.lora.targets=a").method.targets == ("a",)


TEXTS = ["try #1", "#1", "v1: first", "a: b: c", "007", "1e3", "true", "- x", "[x]", "{x}", "*x"]


@pytest.mark.parametrize("text", [*TEXTS, "a  b", "a=b"])
def test_text_is_what_the_shell_passed(text):
    assert build("", f"train.name={text}").train.name == text


def test_texts_of_lists_are_kept_as_they_are_written():
    assert build("", "method.lora.targets=a #1").method.targets == ("a #1",)
    several = build("", "method.lora.targets=[a #1, 007, 1e3]").method.targets
    assert several == ("a #1", "007", "1e3")


def test_quotes_around_a_whole_text_are_yaml():
    assert build("", 'train.name="a\\tb #1"').train.name == "a\tb #1"
    assert build("", "train.name='null'").train.name == "null"
    assert build("", "train.name='a' and 'b'").train.name == "'a' and 'b'"


def test_a_number_takes_no_comment():
    assert refused("", "train.steps=3 # three").endswith("expected an integer, got '3 # three'")


def test_nothing_after_the_equals_sign_unsets():
    assert build("train: {name: x}", "train.name=").train.name is None


def test_the_last_override_wins():
    assert build("train: {steps: 1}", "train.steps=2", "train.steps=3").train.steps == 3


def test_neighbours_stay():
    assert build("train: {name: x}", "train.steps=2").train == Train(steps=2, name="x")
    assert build("train: {name: x}", "train={steps: 2}").train == Train(steps=2, name="x")


@pytest.mark.parametrize(
    "text", ["", "method: full", "method: lora", "method: {lora: {rank: 2}}", "method:"]
)
def test_a_setting_of_a_variant_chooses_it(text):
    assert build(text, "method.lora.rank=4").method == Lora(rank=4)


def test_naming_a_variant_switches_to_it():
    assert build("method: {lora: {rank: 2}}", "method=full").method == Full()
    assert build("method: full", "method=lora").method == Lora()


def test_naming_the_variant_that_is_there_keeps_its_settings():
    assert build("method: {lora: {rank: 2}}", "method=lora").method == Lora(rank=2)
    assert build("method: {lora: {rank: 2}}", "method={lora: {targets: x}}").method == Lora(
        rank=2, targets=("x",)
    )


def test_from_python_overrides_are_paths_and_values():
    document = override(
        Root,
        Document({"method": Lora(rank=2), "train": {"name": "x"}}),
        {"method.lora.targets": ("a",), "train": {"steps": 3}},
    )
    assert read(Root, document.data) == Root(
        train=Train(steps=3, name="x"), method=Lora(rank=2, targets=("a",))
    )


@pytest.mark.parametrize("argument", ["train.steps", "=3", "train..steps=3", ".train=1", "a b"])
def test_what_is_no_override_is_refused(argument):
    assert refused("", argument) == (
        f"command line: {argument!r}: expected an override such as train.max_steps=100"
    )


def test_a_value_that_is_no_yaml_is_refused():
    assert refused("", "train.steps=[1").startswith("command line: train.steps=[1:1:3 not YAML")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trian.steps=3", "trian: unknown key (did you mean train?)"),
        ("train.step=3", "train.step: unknown key (did you mean steps?)"),
        ("train.steps=x", "train.steps: expected an integer, got 'x'"),
        ("train.steps.x=3", 'train.steps: expected an integer, got {"x": 3}'),
        ("train=3", "train: expected a section (key: value), got 3"),
        ("method=lroa", "method: expected one of full, lora, got 'lroa' (did you mean lora?)"),
        (
            "method.rank=3",
            "method: expected one of full, lora, got 'rank' (did you mean method.lora.rank?)",
        ),
        ("method.lora.rnk=3", "method.lora.rnk: unknown key (did you mean rank?)"),
    ],
)
def test_a_wrong_override_is_named_as_the_place(argument, message):
    assert refused("train: {steps: 3}", argument) == f"command line: {argument}: {message}"


def test_a_wrong_value_in_the_file_keeps_its_place_beside_overrides():
    assert refused("train:\n  steps: x\n", "train.name=y") == (
        "r.yaml:2:3 train.steps: expected an integer, got 'x'"
    )
    assert refused("train:\n  steps: x\n", "train.name.a=3").splitlines() == [
        'command line: train.name.a=3: train.name: expected text or null, got {"a": 3}',
        "r.yaml:2:3 train.steps: expected an integer, got 'x'",
    ]


def test_overrides_of_a_file_that_is_no_mapping_do_not_hide_that():
    assert refused("[1]", "train.steps=3") == (
        "r.yaml:1:1 expected a section (key: value), got [1]"
    )


OTHERS = {
    "data.max_length=8": "(did you mean data.cutoff_len?)",
    "data.max_seq_length=8": "(did you mean data.cutoff_len?)",
    "generate.max_length=8": "(did you mean generate.max_new_tokens?)",
    "train.batch_size=4": "(did you mean train.micro_batch_size or train.global_batch_size?)",
    "train.per_device_train_batch_size=4": "(did you mean train.micro_batch_size or train.global",
    "train.bf16=true": "(did you mean train.precision?)",
    "train.epochs=3": "(did you mean train.num_epochs?)",
    "--lr=3": "--lr: unknown key (did you mean optim.adamw.learning_rate?)",
    "optim.lr=3": "got 'lr' (did you mean optim.adamw.learning_rate?)",
    "train.gradient_accumulation_steps=2": "(did you mean train.global_batch_size?)",
    "method.lora.r=8": "(did you mean method.lora.rank?)",
    "method.target_modules=all": "(did you mean method.lora.targets?)",
    "model.load_in_4bit=true": "(did you mean model.quantization_bit?)",
    "data.path=x": "(did you mean data.datasets?)",
    "checkpoint.every=5": "(did you mean checkpoint.save_steps?)",
    "model.device=cuda": "; the GPUs that there are are used, otherwise the CPU",
    "train.dataloader_num_workers=2": "; no setting is needed: a thread prefetches batches",
    "data.text_field=x": "; the entry of a dataset says how its rows are read",
}


LEAST = {
    "model": {"path": "m"},
    "data": {"datasets": ["d"]},
    "stage": "sft",
    "train": {"output_dir": "o"},
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_setting_by_the_name_of_another_program_gets_ours(words):
    with pytest.raises(RecipeError) as raised:
        read_recipe(LEAST, [words])
    assert OTHERS[words] in str(raised.value)


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("train.loss=3", "sft"),
        ("train.losses=3", "sft"),
        ("data.shuffle_seed=3", "sft"),
        ("data.shuffleseed=3", "sft"),
        ("optim.adamw.momentum=0.9", "sft"),
        ("optim.adamw.beta3=0.9", "sft"),
        ("train.min_steps=9", "sft"),
        ("train.momentum=0.9", "sft"),
        ("train.label_smoothing=0.1", "kto"),
        ("stage.dpo.group_size=4", "dpo"),
        ("method=dora", "sft"),
        ("stage=ipo", "sft"),
    ],
)
def test_a_setting_that_is_something_else_is_not_proposed(words, stage):
    with pytest.raises(RecipeError) as raised:
        read_recipe({**LEAST, "stage": stage}, [words])
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        ("train.save_steps=3", "checkpoint.save_steps"),
        ("train.lr=1e-4", "optim.muon.learning_rate"),
        ("train.momentum=0.9", "optim.muon.momentum"),
        ("train.ns_stepz=3", ""),
        ("data.valsize=0.1", "val_size"),
        ("train.global_batch_sise=4", "global_batch_size"),
        ("train.max-stps=4", "max_steps"),
    ],
)
def test_a_proposal_is_a_setting_of_the_variant_that_the_user_chose(words, proposed):
    with pytest.raises(RecipeError) as raised:
        read_recipe({**LEAST, "optim": "muon"}, [words])
    assert (f"(did you mean {proposed}?)" in str(raised.value)) is bool(proposed)


def test_what_another_program_is_said_to_call_a_setting_is_one():
    known = {".".join(map(str, way)) for way in paths(Recipe)}
    for hint in hints_by_key().values():
        for word in re.findall(r"did you mean (.*)\?\)", hint):
            assert {*word.replace(" and ", " or ").split(" or ")} <= known | {"beta2"}, word


@pytest.mark.parametrize(
    "overrides",
    [("method=full", "method.lora.rank=4"), ("method.lora.rank=4", "method=full")],
)
def test_settings_of_one_variant_and_the_name_of_another_are_refused(overrides):
    with pytest.raises(RecipeError, match=r"method would be \w+, but .* makes it \w+; leave one"):
        build("method: lora", *overrides)
    with pytest.raises(RecipeError, match=r"method would be lora, but method makes it full"):
        override(Root, Document({}), {"method": "full", "method.lora.rank": 4})


def test_of_two_names_of_variants_the_last_one_wins():
    assert build("train: {}", "method=lora", "method=full").method == Full()
    assert build("train: {}", "method=lora", "method.lora.rank=4").method == Lora(rank=4)
