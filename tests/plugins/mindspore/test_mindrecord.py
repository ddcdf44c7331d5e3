"""Files of MindRecord, which MindSpore reads: not installed here, so its reader is stood in for."""

import json
import sys
import textwrap
from types import ModuleType

import numpy as np
import pytest

import commands
from surefoot.data.rows.catalog import Catalog
from surefoot.data.section import DataSection
from surefoot.errors import DataError

ROW = {"input_ids": np.array([1, 5], np.int32), "text": b"a", "n": 3}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "wiki.mindrecord").write_bytes(b"")
    return tmp_path / "wiki.mindrecord"


def test_its_rows_are_written_where_mindspore_is(source, tmp_path, monkeypatch):
    module = ModuleType("mindspore.mindrecord")
    module.FileReader = lambda _: type("R", (), {"get_next": lambda _: iter([ROW, ROW])})()
    monkeypatch.setitem(sys.modules, "mindspore", ModuleType("mindspore"))
    monkeypatch.setitem(sys.modules, "mindspore.mindrecord", module)
    assert "2 rows" in commands.ok("data", "convert", source, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert rows == [{"input_ids": [1, 5], "text": "a", "n": 3}] * 2
    assert "exists" in commands.refused("data", "convert", source, tmp_path / "out.jsonl")


def test_elsewhere_the_error_has_the_script(source, tmp_path):
    said = commands.refused("data", "convert", source, tmp_path / "out.jsonl")
    script = textwrap.dedent(said.partition("OUT.jsonl):\n")[2])  # errors are indented
    compile(script, "script.py", "exec")
    assert len(script.strip().splitlines()) <= 10
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("name", ["wiki.mindrecord", "{folder}/wiki.mindrecord"])
def test_a_recipe_that_names_one_is_told_the_command(source, tmp_path, name):
    section = DataSection(datasets=(name.format(folder=tmp_path),), dataset_dir=tmp_path)
    with pytest.raises(DataError, match=r"surefoot data convert \S*wiki.mindrecord wiki.jsonl"):
        _ = Catalog(section).entries
