"""Addresses: read as people write them, one spelling each, and a name in the cache for each."""

import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk.manifest import is_plain_name
from surefoot.errors import SurefootError
from surefoot.recipe.recipe import dump, read
from surefoot.storage.remote import Address, default_cache, is_address

SECTIONS = {"model": {"path": "."}, "data": {"datasets": ["a"]}, "stage": "sft"}


def of_recipe(output_dir, **train):
    return read({**SECTIONS, "train": {"output_dir": output_dir, **train}}).train


def test_its_parts():
    address = Address("S3://Bucket/runs/qwen/")
    assert address == "s3://Bucket/runs/qwen"
    assert (address.scheme, address.name, address.parent) == ("s3", "qwen", "s3://Bucket/runs")
    assert address.inside("checkpoint-5") == "s3://Bucket/runs/qwen/checkpoint-5"
    assert Address("gs://bucket").name == "bucket"


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///", "s3://a/../b", "s3://a/./b", "runs/x", "s3:/b"]
)
def test_what_names_no_folder_is_refused(text):
    with pytest.raises(ValueError, match=r"://|'\.\.'"):
        Address(text)


@pytest.mark.parametrize("path", ["runs/x", "/abs/x", "c:/x", "a//b", "~/x", Path("s3://x")])
def test_a_path_is_no_address(path):
    assert not is_address(path)


def test_a_recipe_takes_either_and_gives_it_back():
    remote, local = of_recipe("s3://bucket/run/"), of_recipe("runs/x")
    assert remote.output_dir == Address("s3://bucket/run")
    assert type(remote.output_dir) is Address
    assert local.output_dir == local.folder == Path("runs/x")
    recipe = read({**SECTIONS, "train": {"output_dir": "memory://x"}})
    assert "output_dir: memory://x\n" in dump(recipe)
    assert read(recipe) == recipe


def test_the_cache_is_the_users_or_what_the_recipe_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = of_recipe("s3://bucket/runs/qwen").folder
    assert folder.parent == default_cache() == tmp_path / "surefoot" / "runs"
    assert folder.name.startswith("bucket-runs-qwen-")
    assert of_recipe("s3://b/q", cache_dir=str(tmp_path / "c")).folder.parent == tmp_path / "c"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache() == Path.home() / ".cache" / "surefoot" / "runs"


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1))
def test_every_address_has_a_plain_name_of_its_own(rest):
    try:
        one, other = Address(f"s3://b/{rest}"), Address(f"s3://b/{rest}/x")
    except ValueError:
        return
    assert is_plain_name(one.slug)
    assert one.slug != other.slug
    assert len(one.slug) <= 73


def test_without_a_home_folder_the_cache_is_named_by_the_variable(monkeypatch):
    """As for a user id of a container that no list of users has."""

    def unknown(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SurefootError, match="set XDG_CACHE_HOME to a folder"):
        default_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(default_cache()) == "/cache/surefoot/runs"
