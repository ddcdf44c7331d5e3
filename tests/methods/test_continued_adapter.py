"""An adapter that is continued has settings already: the recipe adopts them, or is refused."""

import logging

import pytest

import surefoot
from folders import save_adapter, save_data, save_model, save_recipe
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.model.weight_matrices import adapted
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe, dump, load, read
from surefoot.run.resolving import resolved
from surefoot.run.training_run import read_recipe

SETTINGS = {
    "r": 6,
    "lora_alpha": 9,
    "lora_dropout": 0.25,
    "use_rslora": True,
    "use_dora": True,
    "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"v_proj": 5},
    "modules_to_save": ["lm_head"],
    "target_modules": ["v_proj", "q_proj"],
}
OURS = {
    "rank": 6,
    "alpha": 9.0,
    "dropout": 0.25,
    "rslora": True,
    "dora": True,
    "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"v_proj": 5},
    "modules_to_save": ("lm_head",),
    "targets": ("q_proj", "v_proj"),
}
OTHER = {
    "rank": 16,
    "alpha": 1.0,
    "dropout": 0.5,
    "modules_to_save": ["embed_tokens"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"v_proj": 7},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continued")
    save_model(folder / "model")
    save_adapter(folder / "model", folder / "adapter", **SETTINGS)
    save_adapter(folder / "model", folder / "usual", r=16, lora_alpha=32)
    return folder


def recipe_of(folder, *, adapter="adapter", **lora):
    return {
        "model": {"path": str(folder / "model"), "adapter": str(folder / adapter)},
        "data": {"datasets": ["sums"]},
        "stage": "sft",
        "method": {"lora": lora},
        "train": {"output_dir": str(folder / "run"), "max_steps": 1},
    }


def test_every_setting_is_the_adapter_s(folder):
    recipe = resolved(read(recipe_of(folder)))
    assert recipe.method == LoRA(**OURS)
    assert "rank: 6" in dump(recipe), "recorded as it is trained"
    assert resolved(read(recipe_of(folder, **OURS))).method == LoRA(**OURS), (
        "the same again is no conflict"
    )


def test_what_follows_from_the_rank_is_not_recorded_as_a_choice(folder):
    method = resolved(read(recipe_of(folder, adapter="usual"))).method
    assert (method.rank, method.alpha) == (16, None)


@pytest.mark.parametrize("setting", OTHER)
def test_another_value_of_the_recipe_is_refused_where_it_stands(folder, setting):
    words = rf"^method\.lora\.{setting}: .*, but .* in model\.adapter .*leave it out"
    with pytest.raises(RecipeError, match=words):
        resolved(read(recipe_of(folder, **{setting: OTHER[setting]})))


def test_a_recipe_made_in_python_adopts_them_too(folder):
    plain = read({**recipe_of(folder), "model": {"path": str(folder / "model")}})
    made = Recipe(
        **{name: getattr(plain, name) for name in ("data", "stage", "train", "method")},
        model=read(recipe_of(folder)).model,
    )
    assert resolved(read_recipe(made, {})).method == LoRA(**OURS)


def test_an_adapter_that_cannot_be_read_is_reported_when_it_is_opened(folder, tmp_path):
    path = save_recipe(tmp_path, model={"adapter": "nowhere"}, method={"lora": {"rank": 3}})
    assert resolved(load(path)).method == LoRA(rank=3)


def opened(folder, adapter, method):
    section = read(recipe_of(folder, adapter=adapter)).model
    options = NetworkOptions(method=method)
    return open_network(folder / "model", section, None, ALONE, options).module


def test_what_is_continued_is_said_once(folder, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    train = {"train": {"output_dir": str(tmp_path), "max_steps": 1, "eval_steps": None}}
    save_data(folder / "data")
    path = save_recipe(folder, **recipe_of(folder, adapter="usual"))
    surefoot.train(path, **train)
    assert caplog.text.count("continuing an adapter: rank 16") == 1


def test_targets_may_have_other_names_for_the_same_parameters(folder, caplog):
    caplog.set_level(logging.INFO, logger="surefoot")
    mixed = ("self_attn.q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for targets in (("all",), mixed):
        found = opened(folder, "usual", LoRA(rank=16, targets=targets))
        assert len(adapted(found)) == 21
    assert "continuing an adapter: rank 16, alpha 32, dropout 0, targets down_proj" in caplog.text


def test_other_targets_are_refused(folder):
    for targets in (("q_proj",), ("all",)):
        with pytest.raises(RecipeError, match=r"but model\.adapter adapts q_proj, v_proj; leave"):
            opened(folder, "adapter", LoRA(targets=targets))


def test_fewer_layers_than_the_adapter_has_are_refused(folder):
    words = r"^method\.lora\.layers: 0, but model\.adapter also adapts model\.layers\.1.*leave"
    with pytest.raises(RecipeError, match=words):
        opened(folder, "usual", LoRA(rank=16, layers=(0,)))
