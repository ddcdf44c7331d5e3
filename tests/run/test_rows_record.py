"""A resume on other rows is refused with the rows that were edited, added, removed or moved."""

import json
import shutil

import numpy as np
import pytest

import surefoot
from project import CHATML, Project
from surefoot.errors import DataError
from surefoot.run.rows_record import NAME, RowsRecord

LORA = {"lora": {"rank": 2}}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("rows"), method=LORA)
    project.sections["train"]["max_steps"] = 3
    project.write()
    surefoot.train(project.recipe)
    return project


def edited(rows):
    row = json.loads(rows[5])
    rows[5] = json.dumps({**row, "output": row["output"] + " Really."})


def swapped(rows):
    rows[2], rows[9] = rows[9], rows[2]


CHANGES = {
    "row 5 of sums was edited": edited,
    "1 row was added to sums, as row 24": lambda rows: rows.append(rows[0]),
    "1 row was added to sums, as row 4": lambda rows: rows.insert(4, rows[20]),
    "rows 7 to 8 of sums were removed": lambda rows: rows.__delitem__(slice(7, 9)),
    "rows 2 and 9 of sums have changed places": swapped,
    "row 3 of sums was moved to 11": lambda rows: rows.insert(11, rows.pop(3)),
    "row 11 of sums was moved to 3": lambda rows: rows.insert(3, rows.pop(11)),
    "rows 0 to 23 of sums are in another order": lambda rows: rows.reverse(),
}


@pytest.mark.parametrize("said", CHANGES)
def test_the_rows_that_changed_are_named(said, project):
    file = project.folder / "data" / "sums.jsonl"
    before = file.read_text()
    rows = before.splitlines()
    CHANGES[said](rows)
    file.write_text("".join(f"{row}\n" for row in rows))
    try:
        with pytest.raises(DataError) as raised:
            surefoot.train(project.recipe, **{"train.max_steps": 4})
    finally:
        file.write_text(before)
    assert f"cannot resume from checkpoint-3: {said} (the first row is 0)" in str(raised.value)


def test_a_changed_template_is_named_with_its_line(project):
    files = [
        *(project.folder / "model").glob("*template*"),
        *project.folder.glob("model/tok*.json"),
    ]
    kept = {path: path.read_text() for path in files}
    changed = CHATML.replace("{% else %}{{ m.content }}", "{% else %}{{ m.content }} ")
    for path, text in kept.items():
        old, new = (json.dumps(each)[1:-1] for each in (CHATML, changed))
        path.write_text(text.replace(CHATML, changed).replace(old, new))
    try:
        with pytest.raises(
            DataError, match=r"the chat template has changed: line 3 was '.*' and is"
        ):
            surefoot.train(project.recipe, **{"train.max_steps": 4})
    finally:
        for path, text in kept.items():
            path.write_text(text)


def test_the_record_is_eight_bytes_a_row_and_of_the_first_launch(project, tmp_path):
    run = shutil.copytree(project.run, tmp_path / "run")
    record = RowsRecord.read(run)
    assert [*record.hashes] == ["sums"]
    assert len(record.hashes["sums"]) == 24
    assert len(np.unique(record.hashes["sums"])) == 24
    head, _, body = (run / NAME).read_bytes().partition(b"\n")
    assert len(body) == 8 * 24
    (run / NAME).unlink()
    surefoot.train(run, **{"train.max_steps": 4})  # a run of an earlier version
    assert (RowsRecord.read(run).data, (run / NAME).read_bytes()) == (
        record.data,
        head + b"\n" + body,
    )
    (run / NAME).write_bytes(b"{")
    assert RowsRecord.read(run) is None
