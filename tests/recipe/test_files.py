import os

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe.files import read_text


def refused(path):
    with pytest.raises(RecipeError) as caught:
        read_text(path)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "qwen.yaml").write_text("a: 1\n")
    (tmp_path / "llama_sft.yml").write_text("a: 1\n")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def test_text_comes_without_a_byte_order_mark(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\r\n")
    assert read_text(tmp_path / "r.yaml") == "a: é\r\n"


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("qwn.yaml", "qwen.yaml"),
        ("llama_sft.yaml", "llama_sft.yml"),
        ("qwen", "qwen.yaml"),
        ("zebra", None),
        ("no/r.yaml", None),
    ],
)
def test_a_missing_file_gets_a_near_name_if_there_is_one(folder, asked, near):
    meant = f" (did you mean {folder / near}?)" if near else ""
    assert refused(folder / asked) == f"{folder / asked}: no such file{meant}"


def test_a_folder_is_refused_with_the_recipes_in_it(folder):
    text = f"{folder}: is a folder, expected a recipe file"
    assert refused(folder) == f"{text} such as {folder / 'llama_sft.yml'}, {folder / 'qwen.yaml'}"
    for path in folder.iterdir():
        path.unlink()
    assert refused(folder) == text


def test_the_folder_of_a_run_leads_to_the_recipe_in_its_newest_checkpoint(tmp_path):
    for step in (9, 120, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "recipe.yaml").touch()
    newest = tmp_path / "checkpoint-120" / "recipe.yaml"
    wanted = f"{tmp_path}: is a folder, expected a recipe file such as {newest}"
    assert refused(tmp_path) == wanted


def test_a_file_as_a_folder_is_refused(folder):
    assert refused(folder / "qwen.yaml" / "x").endswith(
        "cannot be read: a part of the path is not a folder"
    )


def test_text_that_is_not_utf_8_says_where(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"a: 1\nb: caf\xe9\n")
    assert refused(path) == f"{path}:2: not UTF-8 text (byte 0xe9); save it as UTF-8"
    path.write_bytes("a: 1\n".encode("utf-16"))
    assert "not UTF-8 text" in refused(path)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert refused(path) == f"{path}: a binary file, expected a recipe in YAML"


def test_a_large_file_is_refused_unread(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(10_000_000_000)  # a hole: takes no space, would take long to read
    assert refused(path) == (
        f"{path}: 10,000,000,000 bytes is too large for a recipe; is it another file?"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(folder):
    (folder / "qwen.yaml").chmod(0)
    assert refused(folder / "qwen.yaml").endswith("cannot be read: Permission denied")


def test_a_name_too_long_for_the_disk_is_refused(tmp_path):
    assert "cannot be read" in refused(tmp_path / ("x" * 5000))
