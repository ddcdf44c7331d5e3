"""The memory that data takes does not grow with it. Counted by Python, so no page is in doubt."""

import json
import tracemalloc
from concurrent.futures import Executor, Future
from functools import partial

from surefoot.data.order.loader import Loader, Shuffle
from surefoot.data.order.micro_batches import Batching, Collation
from surefoot.data.section import DataSection
from surefoot.data.store import _shards
from surefoot.data.text.collation import collate
from surefoot.data.training_data import Encoding, encode_stream, open_stream, prepare

FEW, MANY = 2_000, 4_000
TEXT = "so it goes on and on " * 100


def section(folder, rows):
    folder.mkdir()
    with (folder / "d.jsonl").open("w") as file:
        for i in range(rows):
            file.write(json.dumps({"instruction": f"{i} {TEXT}", "output": "x"}) + "\n")
    (folder / "dataset_info.json").write_text('{"d": {"file_name": "d.jsonl"}}')
    return DataSection(
        datasets=("d",), dataset_dir=folder, cache_dir=folder / "cache", buffer_size=500
    )


def encode(examples):
    return [[{"input_ids": list(range(40)), "labels": list(range(40))}] for _ in examples]


def peak(work):
    """Bytes that Python holds at most while it does ``work``, beyond those it held before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def stream_an_epoch(data):
    shards = encode_stream(Encoding(data, encode, {}, 1), shard_rows=500)
    more = partial(next, shards, None)
    stream = open_stream(Encoding(data, encode, {}, 1), more).train
    batching = Batching(Collation(collate), micro_batch_size=50)
    it = Loader(Shuffle(stream, 1, buffer_size=500), batching, global_batch_size=50)
    while it.epoch == 0:
        it.next_window()


class InTurn(Executor):
    """Threads that never run ahead: else the peak depends on which of them is late."""

    def __init__(self, _count):
        pass

    def submit(self, work, *args):
        done = Future()
        done.set_result(work(*args))
        return done


def test_a_stream_takes_the_same_memory_whatever_its_length(tmp_path, monkeypatch):
    monkeypatch.setattr(_shards, "ThreadPoolExecutor", InTurn)
    few, many = (section(tmp_path / str(rows), rows) for rows in (FEW, MANY))
    stream_an_epoch(section(tmp_path / "warm up", 100))
    bounds = [peak(partial(stream_an_epoch, data)) for data in (few, many)]
    assert bounds[1] < bounds[0] + 200_000  # of 4 MB more text, in 4 more shards that are open


def test_a_whole_dataset_takes_a_few_bytes_of_memory_for_an_example(tmp_path):
    few, many = (section(tmp_path / str(rows), rows) for rows in (FEW, MANY))

    def work(data):
        prepare(Encoding(data, encode, {}, 1))

    work(section(tmp_path / "warm up", 100))
    bounds = [peak(partial(work, data)) for data in (few, many)]
    assert bounds[1] - bounds[0] < 64 * (MANY - FEW)
