"""Every example of docs/how-to/datasets.md is read as the page says."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.formats import FORMATS
from surefoot.data.rows.rows import read_examples
from surefoot.data.section import DataSection

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "datasets.md").read_text(encoding="utf-8")
PAIRS = re.findall(
    r'```json title="(\S+)"\n(.*?)```\n\n```json title="dataset_info.json"\n(.*?)```', PAGE, re.S
)


@pytest.mark.parametrize(("file", "rows", "info"), PAIRS, ids=[file for file, *_ in PAIRS])
def test_the_rows_are_read_by_the_entry_below_them(tmp_path, file, rows, info):
    (tmp_path / file).write_text(rows, encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text(info, encoding="utf-8")
    (name,) = json.loads(info)
    examples = list(
        read_examples(Catalog(DataSection(datasets=(name,), dataset_dir=tmp_path)).entry(name))
    )
    assert len(examples) == rows.count("\n")
    assert examples[0].token_ids or examples[0].messages[-1].content


def test_every_block_of_rows_has_its_entry():
    assert len(PAIRS) == PAGE.count('.jsonl"\n') == PAGE.count('title="dataset_info.json"') == 8


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_its_usual_names_are_on_the_page(name):
    assert f"`{name}`" in PAGE
    for field in fields(FORMATS[name]):
        assert f"`{field.name}`" in PAGE or field.name == "ranking"
