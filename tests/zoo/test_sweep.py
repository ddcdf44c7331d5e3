"""Every architecture does what the table in docs/architectures.md says."""

import pytest

from each import some
from zoo import architectures, page, picture_models, picture_sweep, sweep

# Those of other packages, which a user's run would show, are no failure of it: transformers gives
# NumPy tensors that are copied in a way which is deprecated (glm4v).
pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLE = {  # what broke once, in a few seconds
    "falcon_h1": ["resume"],
    "afmoe": ["packed", "resume"],
    "llama4_text": ["packed"],
    "gemma3n_text": ["full"],
    "gptj": ["packed"],
    "mixtral": ["head"],
    "deepseek_v3": ["kept tensors"],
}
PICTURES = {  # what was wrong without a word, or a traceback
    "video_llama_3": "full",
    "llava_onevision": "packed",
    "qwen3_5": "full",
    "paligemma": "full",
    "glm4v": "full",
}


def cells(row):
    return {column: cell for column, (cell, _) in row.items()}


@pytest.mark.parametrize("name", some(SAMPLE, ["llama4_text", "deepseek_v3"]))
def test_an_architecture_does_what_the_table_says(name, tmp_path):
    found = sweep.row(name, tmp_path / "model", SAMPLE[name])
    expected = {column: page.read()[name][column] for column in SAMPLE[name]}
    assert cells(found) == cells(expected), found
    assert set(cells(found).values()) == {"yes"}


@pytest.mark.parametrize("name", some(PICTURES, ["llava_onevision", "paligemma"]))
def test_a_type_that_reads_pictures_does_what_the_table_says(name, tmp_path):
    column = PICTURES[name]
    found = picture_sweep.row(name, tmp_path / "model", [column])
    assert found[column][0] == page.read("type")[name][column][0], found
    assert found[column][0] == ("refused" if name == "paligemma" else "yes"), found


@pytest.mark.proof
@pytest.mark.parametrize("name", picture_models.KINDS)
def test_every_type_that_reads_pictures_does_what_the_table_says(name, tmp_path):
    found = picture_sweep.row(name, tmp_path / "model")
    assert cells(found) == cells(page.read("type")[name]), found


@pytest.mark.proof
@pytest.mark.parametrize("name", architectures.SETTINGS)
def test_every_architecture_does_what_the_table_says(name, tmp_path):
    found = sweep.row(name, tmp_path / "model")
    assert cells(found) == cells(page.read()[name]), found


def test_the_table_has_rows_of_architectures_in_their_order():
    rows = page.read()
    assert list(rows) == [name for name in architectures.SETTINGS if name in rows]
    assert SAMPLE.keys() <= rows.keys()


@pytest.mark.proof
def test_the_tables_have_a_row_for_each_architecture_and_none_fails():
    assert page.read().keys() == architectures.SETTINGS.keys()
    rows = page.read("type")
    assert list(rows) == picture_models.KINDS
    assert not [name for name, row in rows.items() if "fails" in cells(row).values()]


def test_a_page_is_read_as_it_was_written(tmp_path, monkeypatch):
    rows = {"llama": {"full": ("yes", ""), "tp": ("refused", "why")}}
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    pictures = {"blip": dict.fromkeys(("full", "lora"), ("refused", "/tmp/x/model: no | sign"))}
    page.PAGE.write_text(page.text(rows, pictures))
    assert {name: cells(row) for name, row in page.read().items()} == {
        "llama": {"full": "yes", "tp": "refused"}
    }
    both = ("refused", "no \\| sign")
    assert page.read("type") == {"blip": {"full": both, "lora": both}}
