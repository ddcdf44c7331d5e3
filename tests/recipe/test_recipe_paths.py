import logging
from pathlib import Path

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe.files import read_text
from surefoot.recipe.recipe import dump, load
from surefoot.schema.locations import ModelPath, locate


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A recipe's folder ``<tmp>/recipes`` and the current folder ``<tmp>/here``."""
    for folder in ("recipes/data", "here/data", "here/models/base", "recipes/only"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "recipes"


@pytest.mark.parametrize(
    ("path", "beside", "found"),
    [
        ("data", "recipes", "recipes/data"),  # beside the recipe first
        ("../recipes/only", "recipes", "recipes/only"),
        ("models/base", "recipes", "here/models/base"),  # then the current folder
        ("missing", "recipes", "recipes/missing"),
        ("newest", "recipes", "recipes/newest"),  # a link keeps its name
        ("~/data", "/", "recipes/data"),
        ("base", "here/models", "here/models/base"),
    ],
)
def test_a_path_is_beside_the_recipe_or_here(base, path, beside, found, monkeypatch):
    monkeypatch.setenv("HOME", str(base))
    (base / "newest").symlink_to(base / "data")
    assert locate(Path(path), base.parent / beside) == base.parent / found
    assert locate(base.parent / "x", base) == base.parent / "x"
    assert locate(Path("base"), Path("models")) == base.parent / "here/models/base"


def test_a_model_is_a_folder_or_a_hub_id(base):
    assert ModelPath("models/base").located(base) == str(base.parent / "here/models/base")
    assert ModelPath("Qwen/Qwen3-0.6B").located(base) == "Qwen/Qwen3-0.6B"
    assert ModelPath("").located(base) == ""


def test_the_url_of_a_run_is_no_recipe_and_the_error_says_where_one_is():
    with pytest.raises(RecipeError, match=r"is a URL.*recipe\.yaml of that run"):
        read_text(Path("s3://bucket/run"))


@pytest.mark.parametrize("word", ["1", "true", "yes"])
def test_a_profile_that_chooses_modelscope_counts_for_recipes(base, monkeypatch, caplog, word):
    caplog.set_level(logging.INFO)
    recipe = base / "recipe.yaml"
    recipe.write_text(
        "{model: {path: a/b}, data: {datasets: [c/d], hub: huggingface}, stage: sft, "
        "train: {output_dir: run}}"
    )
    assert load(recipe).model.hub == "huggingface"
    monkeypatch.setenv("USE_MODELSCOPE_HUB", word)
    chosen = load(recipe)
    assert (chosen.model.hub, chosen.data.hub) == ("modelscope", "huggingface")
    assert caplog.messages == ["model.hub: modelscope, unless set (USE_MODELSCOPE_HUB)"]
    assert load(recipe, ["model.hub=huggingface"]).model.hub == "huggingface"
    monkeypatch.delenv("USE_MODELSCOPE_HUB")
    recipe.write_text(dump(chosen))  # as in the folder of a run
    assert load(recipe).model.hub == "modelscope"
    monkeypatch.setenv("USE_OPENMIND_HUB", "1")
    load(recipe)
    assert caplog.messages[-1] == (
        "USE_OPENMIND_HUB is set, and that hub is not read; use a local folder"
    )
