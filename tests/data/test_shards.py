"""A dataset encoded piece by piece: what is there stays, and what is missing is made."""

import json
from itertools import islice

import pytest

from surefoot.data.prepared.encoded_data import Encoding
from surefoot.data.prepared.streaming_data import encode_stream, open_stream
from surefoot.data.rows.registry import read_registry
from surefoot.data.section import DataSection
from surefoot.data.store.shards import WHOLE, encode_shards, find_shard, read_whole, rows_of
from surefoot.data.store.stream import ExampleStream, StreamedDataset
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
    """A dataset of ten rows; gives the shards, as they are made, of four rows each."""
    write(tmp_path, range(10))

    def encode(encoder, **changes):
        section = DataSection(datasets=("d",), dataset_dir=tmp_path, **changes)
        rows = rows_of(read_registry(tmp_path).entry("d"), section)
        return encode_shards(rows, encoder, tmp_path / "out", shard_rows=4)

    return encode


def write(folder, numbers):
    rows = [json.dumps({"instruction": str(n), "output": "x"}) + "\n" for n in numbers]
    (folder / "d.jsonl").write_text("".join(rows))
    (folder / "dataset_info.json").write_text('{"d": {"file_name": "d.jsonl"}}')


def fail():
    raise AssertionError("nothing is missing")


def tokens(folder):
    stream = ExampleStream([StreamedDataset("d", folder)], fail)
    return [stream[i]["input_ids"].tolist()[0] for i in range(stream.reach(100))]


def test_shards_come_one_by_one_and_the_end_is_told_last(project, tmp_path):
    out, encoder = tmp_path / "out", Encoder()
    reports = project(encoder)
    assert [next(reports).rows for _ in range(3)] == [4, 8, 10]
    assert read_whole(out) is None
    assert list(reports) == []
    assert (read_whole(out).shards, read_whole(out).items) == (3, 10)
    assert tokens(out) == list(range(10))
    assert find_shard(out, 1).store.rows.tolist() == [4, 5, 6, 7], "rows of the dataset"


def test_whoever_goes_on_encodes_only_what_is_missing(project, tmp_path):
    list(islice(project(Encoder()), 2))
    encoder = Encoder()
    assert [report.rows for report in project(encoder)] == [4, 8, 10]
    assert encoder.seen == [8, 9]
    assert tokens(tmp_path / "out") == list(range(10))
    assert list(project(encoder))[-1].items == 10
    assert encoder.seen == [8, 9]


def test_two_at_once_share_the_work(project, tmp_path):
    one, other = Encoder(), Encoder()
    turns = [project(one), project(other)]
    while [next(turn, None) for turn in turns] != [None, None]:
        pass
    assert sorted(one.seen + other.seen) == list(range(10))
    assert tokens(tmp_path / "out") == list(range(10))


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_shard_is_made_anew(project, tmp_path, whole):
    list(project(Encoder()))
    before = [find_shard(tmp_path / "out", n).store.content for n in range(3)]
    file = tmp_path / "out" / "00000001" / "input_ids.tokens"
    file.write_bytes(file.read_bytes()[:-1])
    if not whole:
        (tmp_path / "out" / WHOLE).unlink()
    encoder = Encoder()
    list(project(encoder))
    assert encoder.seen == [4, 5, 6, 7]
    assert [find_shard(tmp_path / "out", n).store.content for n in range(3)] == before


@pytest.fixture
def opened(tmp_path):
    """Opens the stream of a dataset of ten rows, all of it encoded; each row is long."""
    write(tmp_path, range(10))
    data = DataSection(datasets=("d",), dataset_dir=tmp_path, cache_dir=tmp_path / "cache")

    def encode(examples):
        return [
            [{"input_ids": [int(example.messages[0].content)] * 9_000, "labels": [1] * 9_000}]
            for example in examples
        ]

    encoding = Encoding(data, encode, {}, 1)
    list(encode_stream(encoding))
    return lambda: open_stream(encoding, fail).train


def firsts(stream):
    return [int(stream[i]["input_ids"][-1]) for i in range(stream.reach(100))]


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_damage_that_is_noticed_while_a_stream_is_read_is_encoded_again(
    opened, tmp_path, caplog, how
):
    (file,) = tmp_path.glob("cache/*.shards/00000000/input_ids.tokens")
    if how == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    stream = opened()
    assert stream.reach(10) == 10
    assert stream[0]["input_ids"][0] == 0
    if how == "cut":
        with file.open("r+b") as opened_file:
            opened_file.truncate(100)
    assert firsts(stream) == list(range(10))
    assert [f"{file.parent} is damaged: encoding it again"] == caplog.messages
    assert firsts(opened()) == list(range(10))


def test_a_shard_that_is_gone_from_a_complete_dataset_is_encoded_again(opened, tmp_path):
    (file,) = tmp_path.glob("cache/*.shards/00000000/header.json")
    file.unlink()
    assert firsts(opened()) == list(range(10))


def test_a_damaged_shard_of_a_source_that_has_changed_is_an_error(opened, tmp_path):
    (file,) = tmp_path.glob("cache/*.shards/00000000/input_ids.tokens")
    stream = opened()
    assert stream.reach(10) == 10
    file.write_bytes(bytes(file.stat().st_size))
    write(tmp_path, range(12))
    with pytest.raises(DataError, match=r"shard 0 is damaged, .*d.jsonl has changed since"):
        firsts(stream)


def test_a_source_that_changes_meanwhile_stops_it(project, tmp_path):
    shards = project(Encoder())
    next(shards)
    write(tmp_path, range(12))
    with pytest.raises(DataError, match=r"'d': .*d.jsonl changed while it was read"):
        next(shards)
    assert find_shard(tmp_path / "out", 1) is None


def test_nothing_to_learn_says_why(project, tmp_path):
    write(tmp_path, [])
    with pytest.raises(DataError, match="has no rows"):
        list(project(Encoder()))
    write(tmp_path, range(5))
    with pytest.raises(DataError, match="none of its 5 rows has trained tokens"):
        list(project(lambda examples: [[] for _ in examples]))
    assert read_whole(tmp_path / "out") is None


def test_max_samples_ends_it(project):
    encoder = Encoder()
    assert list(project(encoder, max_samples=5))[-1].rows == 5
    assert encoder.seen == list(range(5))
