"""Several processes encode one dataset: what comes of it is that of one process, to the byte."""

import json
import time
from dataclasses import replace

import pytest

from project import Project
from surefoot.data.rows.catalog import Catalog
from surefoot.data.section import DataSection
from surefoot.data.store import _shards
from surefoot.data.store._shares import Shares
from surefoot.data.training_data import Encoding, prepare
from surefoot.errors import DataError
from surefoot.model.loading import resolve
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import encoding_of, open_codec
from surefoot.run.from_python import StageParts
from surefoot.storage.child import Child

# Sends what a process would: a file that another part of the test has written.
PROCESS = """
import json, sys
fingerprint, file = sys.argv[1:]
print(json.dumps({"fingerprint": fingerprint}), flush=True)
row = json.loads(sys.stdin.readline())["first_row"]
sys.stdout.buffer.write(open(f"{file}.{row}", "rb").read())
"""
NUM_ROWS = 20


def SAME(_number, data):
    return data


def first_dataset(encoding):
    return encoding.complete(Catalog(encoding.section).entries[0])


def encode(examples):
    """A row of n becomes n tokens, in two items where n is 7; a multiple of 5 is dropped."""
    numbers = [int(example.messages[0].content) for example in examples]
    return [
        _shards.Dropped("fives")
        if n % 5 == 0
        else [{"input_ids": [n] * n, "labels": [-100] * n}] * (2 if n == 7 else 1)
        for n in numbers
    ]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A dataset of which two rows are broken, in batches of three, with a cache of its own; and
    ``shares`` of it, whose processes begin behind ``first`` rows, some of them changed."""
    monkeypatch.setattr(_shards, "BATCH", 3)
    lines = [json.dumps({"instruction": str(n), "output": "x"}) for n in range(NUM_ROWS)]
    lines[4] = lines[11] = "{"
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "d.jsonl"}}')

    def made(cache, encode=encode):
        section = DataSection(datasets=("d",), dataset_dir=tmp_path, cache_dir=tmp_path / cache)
        return Encoding(section, encode, {}, 1)

    def shared(cache, first=6, count=2, change=SAME, fingerprint=None, encode=encode):
        dataset = first_dataset(made(cache))
        for number in range(count):
            path = tmp_path / f"share{number}.{first}"
            with path.open("wb") as file:
                dataset.write_share(file, first, number, count)
            path.write_bytes(change(number, path.read_bytes()))

        def start(number, _count):
            words = [fingerprint or dataset.fingerprint, str(tmp_path / f"share{number}")]
            return Child(["-c", PROCESS, *words], talks=True, patience=0.0)

        class Waited(Shares):
            """They are ready when this process has encoded ``first`` rows."""

            asked = 0

            def are_ready(self):
                self.asked += 1
                if self.asked <= first // 3:
                    return False
                while not (is_ready := super().are_ready()) and self._count:
                    time.sleep(0.01)
                return is_ready

        shares = Waited(start, "d", dataset.fingerprint, count, 0.0)
        monkeypatch.setattr(_shards.ShardedDataset, "_shares", lambda _: shares)
        return prepare(made(cache, encode))

    return made, shared


def content(folder):
    return {
        file.relative_to(folder).name: file.read_bytes()
        for file in folder.glob("*/*")
        if file.is_file()
    }


@pytest.mark.parametrize(("first", "count"), [(6, 2), (0, 3), (18, 2)])
def test_the_cache_of_several_processes_is_that_of_one(opened, tmp_path, first, count):
    made, shared = opened
    alone = prepare(made("one"))
    data = shared("several", first=first, count=count)
    assert data.report == alone.report
    assert [row.index for row in data.report.datasets[0].broken] == [4, 11]
    assert content(tmp_path / "several") == content(tmp_path / "one")


@pytest.mark.parametrize(
    ("change", "fingerprint", "why"),
    [
        (lambda number, data: data[: len(data) // 2] if number else data, None, "ended"),
        (lambda number, data: b"", None, "ended"),
        (SAME, "another", "would encode something else"),
    ],
)
def test_what_a_lost_process_leaves_is_encoded_here(
    opened, tmp_path, caplog, change, fingerprint, why
):
    made, shared = opened
    prepare(made("one"))
    shared("several", change=change, fingerprint=fingerprint)
    assert content(tmp_path / "several") == content(tmp_path / "one")
    assert f"encodes the rest, which takes longer: another one {why}" in caplog.text


def test_the_error_of_a_row_is_that_of_one_process_and_leaves_no_cache(opened, tmp_path):
    """A process that meets it has ended, and the row is encoded again."""
    _, shared = opened

    def raised(examples):
        if any(example.messages[0].content == "13" for example in examples):
            raise DataError("row 13")
        return encode(examples)

    with pytest.raises(DataError, match="row 13"):
        shared("several", encode=raised, change=lambda number, data: b"" if number else data)
    assert not content(tmp_path / "several")


def test_a_stage_with_members_from_python_is_encoded_by_one_process(tmp_path, monkeypatch):
    """Whatever the cores and however long it takes: no recipe says what it is."""
    monkeypatch.setattr(_shards, "num_shares", lambda: 2)
    monkeypatch.setattr(_shards, "ALONE_SECONDS", 0.0)
    recipe = load(Project(tmp_path).recipe)
    recipe = replace(recipe, stage=StageParts(loss=lambda outputs, batch: None).of(recipe.stage))
    codec = open_codec(recipe, resolve(recipe.model, weights=False))
    assert prepare(encoding_of(recipe, codec)).report.datasets[0].rows == 24


def test_a_real_process_encodes_its_share_of_a_recipe(tmp_path):
    project = Project(tmp_path)
    recipe = load(project.recipe)

    def encoding():
        return encoding_of(recipe, open_codec(recipe, resolve(recipe.model, weights=False)))

    dataset, sent = first_dataset(encoding()), []
    child = encoding().start_share(dataset.rows.name, 0, 1)
    assert child.answer(300) == {"fingerprint": dataset.fingerprint}
    child.send({"first_row": 0})
    while (batch := _shards.EncodedBatch.read(child.process.stdout)) is not None:
        sent.append(batch)
    assert child.process.wait() == 0
    child.end()
    here = list(dataset._encoder(0).share(_shards._Rows(dataset.rows.read()), 0, 1))
    assert [batch.report for batch in sent] == [batch.report for batch in here]
    for one, other in zip(sent, here, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        for name, lists in one.features.items():
            assert lists.flat.tolist() == other.features[name].flat.tolist()
            assert lists.lengths.tolist() == other.features[name].lengths.tolist()
