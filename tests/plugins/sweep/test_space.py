import json

import pytest

from surefoot.errors import RecipeError
from surefoot.plugins.sweep.space import open_space, text_of
from surefoot.recipe.recipe import load
from surefoot.schema import Unset

RECIPE = {
    "model": {"path": "base-model"},
    "data": {"datasets": ["orders"], "dataset_dir": "/data"},
    "stage": "sft",
    "method": "lora",
    "train": {"output_dir": "runs/one", "num_epochs": 2},
    "optim": {"adamw": {"learning_rate": 1.0e-3}},
}


@pytest.fixture
def opened(tmp_path):
    def opened(*arguments, **sections):
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({**RECIPE, **sections}))
        return open_space(path, arguments)

    return opened


def test_a_trial_is_the_recipe_with_its_values_and_a_folder_of_its_own(opened, tmp_path):
    space = opened(
        "optim.adamw.learning_rate=1e-5..1e-3:log", "method.lora.rank=8..64", "data.packing=false"
    )
    made = space.recipe({"optim.adamw.learning_rate": 2e-4, "method.lora.rank": 9}, tmp_path / "t")
    assert (made.optim.learning_rate, made.method.rank, made.data.packing) == (2e-4, 9, False)
    assert made.train.output_dir == tmp_path / "t"
    path = tmp_path / "trial.yaml"
    path.write_text(text_of(made))
    again = load(path)
    assert again == made
    assert isinstance(again.train.global_batch_size, Unset), "a run may still choose it"


def test_the_type_of_a_range_is_the_settings(opened):
    (key,) = opened("optim.adamw.weight_decay=0..1").keys
    assert key.values() is None, "not only 0 and 1"
    assert opened("method.lora.rank=8..64").size == 57
    assert opened("method.lora.rank=8,16", "train.max_grad_norm=0,0.5,1").size == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.adamw.learning_rte=1e-5..1e-3"], "did you mean learning_rate?"),
        (["train.max_step=5,6"], "did you mean max_steps?"),
        (["optim.adam.learning_rate=1e-5..1e-3"], "did you mean adamw?"),
        (["optim.adamw.schedule=cosin,linear"], "did you mean cosine?"),
        (["method.lora.rank=0.5..8"], "expected LOW..HIGH"),
        (["method.lora.rank=-4..8"], "rank"),
        (["data.template=1..3"], "list its values"),
        (["train.output_dir=a,b"], "--output"),
        (["train.max_steps=5"], "nothing varies"),
        (["method.lora.rank=8,16", "method.lora.rank=4,8"], "given twice"),
    ],
)
def test_a_wrong_key_or_value_is_refused_before_anything_starts(opened, arguments, said):
    with pytest.raises(RecipeError) as error:
        opened(*arguments)
    assert said in str(error.value)


def test_a_key_of_another_variant_does_not_replace_the_recipes(opened):
    with pytest.raises(RecipeError, match=r"the recipe's optim is adamw, not lion.*optim=lion"):
        opened("optim.lion.learning_rate=1e-5..1e-3:log")
    (key,) = opened("optim.lion.learning_rate=1e-5..1e-3:log", "optim=lion").keys
    assert key.key == "optim.lion.learning_rate"
    with pytest.raises(RecipeError, match=r"method would be lora, but method=.full. makes"):
        opened("method=lora,full", "method.lora.rank=8,16")


def test_a_key_without_effect_is_refused(opened):
    train = {"output_dir": "runs/one", "max_steps": 10}
    with pytest.raises(RecipeError, match=r"train\.max_steps has precedence and is 10"):
        opened("train.num_epochs=1,2", train=train)
    opened("train.num_epochs=1,2", "train.max_steps=null", train=train)
    with pytest.raises(RecipeError, match=r"warmup_steps has precedence and varies, too"):
        opened("optim.adamw.warmup_ratio=0..0.2", "optim.adamw.warmup_steps=1,2")


def test_values_that_contradict_each_other_are_found_before_the_start(opened):
    with pytest.raises(RecipeError, match=r"must be a multiple of micro_batch_size"):
        opened("train.global_batch_size=4,8", "train.micro_batch_size=4,8")
    with pytest.raises(RecipeError, match=r"train\.micro_batch_size=3: .*multiple"):
        opened("train.micro_batch_size=1..4", "train.global_batch_size=4")


def values(opened, text, key="optim.adamw.weight_decay"):
    return opened(f"{key}={text}").keys[0].values()


def test_a_range_has_two_ends_and_a_scale(opened):
    rank = "method.lora.rank"
    assert [*values(opened, "8..64", rank)] == list(range(8, 65))
    assert values(opened, ".1..1") is None
    (key,) = opened("optim.adamw.learning_rate=1e-5..1e-3:log").keys
    made = key.distribution
    assert (made.low, made.high, made.log) == (1e-5, 1e-3, True)


def test_choices_are_yaml_so_texts_lists_and_paths_are_values(opened):
    assert values(opened, "8,16,32", "method.lora.rank") == [8, 16, 32]
    assert values(opened, "linear,cosine", "optim.adamw.schedule") == ["linear", "cosine"]
    assert values(opened, "[a, b],[c]", "data.datasets") == [["a", "b"], ["c"]]
    assert values(opened, "../one,../two", "model.path") == ["../one", "../two"]
    assert values(opened, "true,false", "data.packing") == [True, False]


def test_a_single_value_holds_for_all_trials(opened):
    space = opened("method.lora.rank=1,2", "train.max_steps=5", "data.datasets=[x,y]")
    assert [key.key for key in space.keys] == ["method.lora.rank"]
    assert space.base.train.max_steps == 5
    assert len(space.base.data.datasets) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8..8", "8 must be below 8"),
        ("1e-3..1e-5:log", "`low <= high` must hold"),
        ("0..1:log", "`low > 0` must hold for `log=True`"),
        ("1..9:logg", "expected LOW..HIGH"),
        ("8..64:10", "expected LOW..HIGH"),
        ("1..x", "expected LOW..HIGH"),
        ("8,8", "a value is given twice"),
        ("", "expected KEY=RANGE"),
        ("8,,9", "not YAML"),
    ],
)
def test_what_is_no_range_is_refused_with_its_reason(opened, text, said):
    with pytest.raises(RecipeError, match=r"weight_decay=") as error:
        values(opened, text)
    assert said in str(error.value)
