"""A dataset encoded piece by piece: what is there stays, and what is missing is made."""

import json
import shutil
from itertools import islice

import pytest

from damage import flip
from surefoot.data.section import DataSection
from surefoot.data.store import dataset as dataset_module
from surefoot.data.store._shards import WHOLE
from surefoot.data.store.dataset import ExampleStream
from surefoot.data.training_data import Encoding, encode_stream, open_stream
from surefoot.errors import DataError


class Encoder:
    """Row n becomes the tokens n and n + 1. Remembers what it was asked."""

    def __init__(self):
        self.seen = []

    def __call__(self, examples):
        numbers = [int(example.messages[0].content) for example in examples]
        self.seen += numbers
        return [[{"input_ids": [n, n + 1], "labels": [n, n + 1]}] for n in numbers]


@pytest.fixture
def project(tmp_path):
    """A dataset of ten rows, in shards of four rows each."""
    write(tmp_path, range(10))

    def opened(encoder=None, **changes):
        how = {"dataset_dir": tmp_path, "cache_dir": tmp_path / "out", **changes}
        section = DataSection(datasets=("d",), streaming=True, **how)
        (dataset,) = Encoding(section, encoder, {}, 1).streamed(shard_rows=4)
        return dataset

    return opened


def write(folder, numbers):
    rows = [json.dumps({"instruction": str(n), "output": "x"}) + "\n" for n in numbers]
    (folder / "d.jsonl").write_text("".join(rows))
    (folder / "dataset_info.json").write_text('{"d": {"file_name": "d.jsonl"}}')


def fail():
    raise AssertionError("nothing is missing")


def tokens(dataset):
    stream = ExampleStream([dataset], fail)
    return [stream[i]["input_ids"].tolist()[0] for i in range(stream.reach(100))]


def test_shards_come_one_by_one_and_the_end_is_told_last(project):
    dataset = project(Encoder())
    reports = dataset.encoded()
    assert [next(reports).rows for _ in range(3)] == [4, 8, 10]
    assert dataset.counts() is None
    assert list(reports) == []
    assert dataset.counts() == (3, 10)
    assert tokens(dataset) == list(range(10))
    assert dataset.find(1).store.rows.tolist() == [4, 5, 6, 7], "rows of the dataset"


def test_an_item_of_a_stream_is_named_by_its_row_and_dataset(project):
    dataset = project(Encoder())
    list(dataset.encoded())
    stream = ExampleStream([dataset], fail)
    assert stream.reach(10) == 10
    named = [stream.origin(item) for item in range(10)]
    assert named == [f"row {row} (the first is 0) of d" for row in range(10)]


def test_whoever_goes_on_encodes_only_what_is_missing(project):
    list(islice(project(Encoder()).encoded(), 2))
    encoder = Encoder()
    assert [report.rows for report in project(encoder).encoded()] == [4, 8, 10]
    assert encoder.seen == [8, 9]
    assert tokens(project()) == list(range(10))
    assert list(project(encoder).encoded())[-1].items == 10
    assert encoder.seen == [8, 9]


def test_two_at_once_share_the_work(project):
    one, other = Encoder(), Encoder()
    turns = [project(one).encoded(), project(other).encoded()]
    while [next(turn, None) for turn in turns] != [None, None]:
        pass
    assert sorted(one.seen + other.seen) == list(range(10))
    assert tokens(project()) == list(range(10))


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_shard_is_made_anew(project, whole):
    dataset = project(Encoder())
    list(dataset.encoded())
    before = [dataset.find(n).store.content for n in range(3)]
    file = dataset.folder / "00000001" / "input_ids.tokens"
    file.write_bytes(file.read_bytes()[:-1])
    if not whole:
        (dataset.folder / WHOLE).unlink()
    encoder = Encoder()
    list(project(encoder).encoded())
    assert encoder.seen == [4, 5, 6, 7]
    assert [dataset.find(n).store.content for n in range(3)] == before


SIZE = 9_000  # tokens of a row


@pytest.fixture
def opened(tmp_path):
    """Opens the stream of a dataset of ten rows, all of it encoded; each row is long."""
    write(tmp_path, range(10))
    data = DataSection(datasets=("d",), dataset_dir=tmp_path, cache_dir=tmp_path / "cache")

    def encode(examples):
        return [
            [{"input_ids": [int(example.messages[0].content)] * SIZE, "labels": [1] * SIZE}]
            for example in examples
        ]

    encoding = Encoding(data, encode, {}, 1)
    list(encode_stream(encoding))
    return lambda: open_stream(encoding, fail).train


def firsts(stream):
    return [int(stream[i]["input_ids"][-1]) for i in range(stream.reach(100))]


def test_a_damaged_shard_of_a_stream_is_encoded_again(opened, tmp_path, caplog):
    (file,) = tmp_path.glob("cache/*.shards/00000000/input_ids.tokens")
    flip(file)
    assert firsts(opened()) == list(range(10))
    (message,) = caplog.messages
    assert message.startswith(f"{file.parent} is damaged (input_ids.tokens ")
    assert message.endswith("): encoding it again")


def test_a_shard_that_is_gone_from_a_complete_dataset_is_encoded_again(opened, tmp_path):
    (file,) = tmp_path.glob("cache/*.shards/00000000/header.json")
    file.unlink()
    assert firsts(opened()) == list(range(10))


def test_a_damaged_shard_of_a_source_that_has_changed_is_an_error(opened, tmp_path):
    (file,) = tmp_path.glob("cache/*.shards/00000000/input_ids.tokens")
    stream = opened()
    flip(file)
    write(tmp_path, range(12))
    with pytest.raises(DataError, match=r"d.jsonl changed while it was read"):
        stream.reach(10)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_shard_that_is_gone_when_it_is_opened_again_must_be_what_it_was(
    opened, tmp_path, monkeypatch, is_same
):
    monkeypatch.setattr(dataset_module, "OPEN", 0)
    (folder,) = tmp_path.glob("cache/*.shards/00000000")
    stream = opened()
    assert stream.reach(10) == 10
    shutil.rmtree(folder)
    if is_same:
        assert firsts(stream) == list(range(10))
        return
    monkeypatch.setitem(globals(), "SIZE", 8_000)  # such as another version of a library
    with pytest.raises(DataError, match="shard 0 has other tokens"):
        firsts(stream)


def test_a_source_that_changes_meanwhile_stops_it(project, tmp_path):
    dataset = project(Encoder())
    shards = dataset.encoded()
    next(shards)
    write(tmp_path, range(12))
    with pytest.raises(DataError, match=r"'d': .*d.jsonl changed while it was read"):
        next(shards)
    assert dataset.find(1) is None


def test_nothing_to_learn_says_why(project, tmp_path):
    write(tmp_path, [])
    with pytest.raises(DataError, match="has no rows"):
        list(project(Encoder()).encoded())
    write(tmp_path, range(5))
    dataset = project(lambda examples: [[] for _ in examples])
    with pytest.raises(DataError, match="none of its 5 rows has trained tokens"):
        list(dataset.encoded())
    assert dataset.counts() is None


def test_max_samples_ends_it(project):
    encoder = Encoder()
    assert list(project(encoder, max_samples=5).encoded())[-1].rows == 5
    assert encoder.seen == list(range(5))
