"""Every architecture does what the table in docs/architectures.md says."""

import pytest

from zoo import architectures, page, sweep

SAMPLE = {  # what broke once, in a few seconds
    "falcon_h1": ["resume"],
    "afmoe": ["packed", "resume"],
    "llama4_text": ["packed"],
    "gemma3n_text": ["full"],
    "gptj": ["packed"],
}


def cells(row):
    return {column: cell for column, (cell, _) in row.items()}


@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_does_what_the_table_says(name, tmp_path):
    found = sweep.row(name, tmp_path / "model", SAMPLE[name])
    expected = {column: page.read()[name][column] for column in SAMPLE[name]}
    assert cells(found) == cells(expected), found
    assert set(cells(found).values()) == {"yes"}


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
def test_the_table_has_a_row_for_each_architecture():
    assert page.read().keys() == architectures.SETTINGS.keys()


def test_a_page_is_read_as_it_was_written(tmp_path, monkeypatch):
    rows = {"llama": {"full": ("yes", ""), "tp": ("refused", "why")}}
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text(page.text(rows))
    assert {name: cells(row) for name, row in page.read().items()} == {
        "llama": {"full": "yes", "tp": "refused"}
    }
