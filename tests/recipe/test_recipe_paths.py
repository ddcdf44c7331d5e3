from pathlib import Path

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe.files import read_text
from surefoot.schema.locations import ModelPath, locate


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A recipe's folder ``<tmp>/recipes`` and the current folder ``<tmp>/here``."""
    for folder in ("recipes/data", "here/data", "here/models/base", "recipes/only"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "recipes"


def test_a_folder_beside_the_recipe_comes_first(base):
    assert locate(Path("data"), base) == base / "data"
    assert locate(Path("../recipes/only"), base) == base / "only"


def test_then_comes_the_current_folder(base):
    assert locate(Path("models/base"), base) == base.parent / "here/models/base"


def test_what_is_nowhere_is_meant_beside_the_recipe(base):
    assert locate(Path("missing"), base) == base / "missing"


def test_an_absolute_path_stays(base):
    assert locate(base.parent / "x", base) == base.parent / "x"


def test_the_home_folder_is_known(base, monkeypatch):
    monkeypatch.setenv("HOME", str(base))
    assert locate(Path("~/data"), Path("/")) == base / "data"


def test_a_link_keeps_its_name(base):
    (base / "newest").symlink_to(base / "data")
    assert locate(Path("newest"), base) == base / "newest"


def test_a_relative_base_is_in_the_current_folder(base):
    assert locate(Path("base"), Path("models")) == base.parent / "here/models/base"


def test_a_model_is_a_folder_or_a_hub_id(base):
    assert ModelPath("models/base").located(base) == str(base.parent / "here/models/base")
    assert ModelPath("Qwen/Qwen3-0.6B").located(base) == "Qwen/Qwen3-0.6B"
    assert ModelPath("").located(base) == ""


def test_the_url_of_a_run_is_no_recipe_and_the_error_says_where_one_is():
    with pytest.raises(RecipeError, match=r"is a URL.*recipe\.yaml of that run"):
        read_text(Path("s3://bucket/run"))
