"""Data that is read while it is encoded: the same windows, whoever reads them and whenever."""

import json
import threading
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.order.loader import Loader, Prefetch
from surefoot.data.order.micro_batches import Batching, Collation
from surefoot.data.section import DataSection
from surefoot.data.text.collation import collate
from surefoot.data.training_data import Encoding, encode_stream, open_stream
from surefoot.errors import DataError
from unpacked import unpack

COLLATE = Collation(collate)
NUMBERS = count()


def encode(examples):
    """Row n becomes the token n, twice, in as many items as its answer says."""
    found = []
    for example in examples:
        number, copies = int(example.messages[0].content), int(example.messages[1].content)
        found.append([{"input_ids": [number] * 2, "labels": [-100, number]}] * copies)
    return found


def write(folder, **datasets):
    """Datasets by name: how many items each of their rows gives; numbers go on."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for name, copies in datasets.items():
        rows = [
            {"instruction": str(number + i), "output": str(each)} for i, each in enumerate(copies)
        ]
        number += len(rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = {name: {"file_name": f"{name}.jsonl"} for name in datasets}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return DataSection(
        datasets=tuple(datasets), dataset_dir=folder, cache_dir=folder / "cache", streaming=True
    )


def loader(section, *, shard_rows=5, val_size=0, encode=encode, **changes):
    """A loader whose data is encoded when it asks for it, a shard at a time."""
    shards = encode_stream(Encoding(section, encode, {}, 1), shard_rows=shard_rows)
    if val_size:
        section = DataSection(**{**vars(section), "val_size": val_size})
    how = {"global_batch_size": 8, "micro_batch_size": 2, "seed": 1, "buffer_size": 6, **changes}
    section = DataSection(**{**vars(section), "buffer_size": how["buffer_size"]})
    data = open_stream(Encoding(section, encode, {}, how["seed"]), partial(next, shards, None))
    return of(data, section, **how), data


def of(data, section, *, seed, global_batch_size, buffer_size, shuffle=True, prefetch=None, **how):
    section = replace(section, buffer_size=buffer_size, shuffle=shuffle)
    order, batching = data.order(section, seed=seed), Batching(COLLATE, **how)
    return Loader(order, batching, global_batch_size=global_batch_size, prefetch=prefetch)


def items(window):
    return [
        [item["input_ids"][0] for item in unpack(batch)] for batch in window if batch.num_trained
    ]


def flat(window):
    return sorted(item for batch in items(window) for item in batch)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders that no other case has."""
    root = tmp_path_factory.mktemp("streams")
    return lambda: root / str(next(NUMBERS))


DATASETS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=14).filter(any), min_size=1, max_size=3
)
ORDERS = {
    "seed": st.integers(0, 3),
    "buffer_size": st.integers(1, 30),
    "shuffle": st.booleans(),
}


@settings(max_examples=12, deadline=None)
@given(datasets=DATASETS, order=st.fixed_dictionaries(ORDERS), shard_rows=st.integers(1, 6))
def test_every_example_comes_once_an_epoch_however_far_the_encoding_is(
    places, datasets, order, shard_rows
):
    section = write(places(), **{f"d{i}": copies for i, copies in enumerate(datasets)})
    numbers = [n for n, copies in enumerate(c for d in datasets for c in d) for _ in range(copies)]
    at_once, data = loader(section, shard_rows=shard_rows, **order)
    data.train.reach(1 << 40)
    for epoch in range(3):
        it, _ = loader(write(places(), **{f"d{i}": c for i, c in enumerate(datasets)}), **order)
        seen = []
        while at_once.epoch == epoch:
            window = at_once.next_window()
            seen += flat(window)
        assert sorted(seen) == numbers
        if epoch == 0:  # encoded as it is asked for: the same windows
            at_once.epoch = at_once.window = 0
            while at_once.epoch == 0:
                assert items(it.next_window()) == items(at_once.next_window())
            assert it.epoch == 1


@settings(max_examples=12, deadline=None)
@given(
    datasets=DATASETS,
    order=st.fixed_dictionaries(ORDERS),
    steps=st.integers(0, 12),
    val_size=st.sampled_from([0, 0, 1]),
    ranks=st.sampled_from([1, 2, 4]),
    is_lost=st.booleans(),
)
def test_a_resumed_loader_goes_on_where_the_saved_one_was_with_any_number_of_ranks(
    places, datasets, order, steps, val_size, ranks, is_lost
):
    datasets = [[1, 1, 1, 1], *datasets]
    named = {f"d{i}": copies for i, copies in enumerate(datasets)}
    section = write(places(), **named)
    order = {**order, "val_size": val_size, "buffer_size": order["buffer_size"] + 2}
    saved, _ = loader(section, **order)
    for _ in range(steps):
        saved.next_window()
    state = saved.state_dict()
    crowd = [
        loader(
            write(places(), **named) if is_lost else section,  # or its cache is there
            **{**order, "micro_batch_size": 1, "rank": rank, "world_size": ranks},
        )[0]
        for rank in range(ranks)
    ]
    for each in crowd:
        each.load_state_dict(state)
        assert each.state_dict() == state
    for _ in range(5):
        windows = [each.next_window() for each in crowd]
        found = sorted(item for window in windows for item in flat(window))
        assert found == flat(saved.next_window())
        assert len({len(window) for window in windows}) == 1, "ranks run equally often"
    assert {each.state_dict()["window"] for each in crowd} == {saved.window}


def test_blocks_are_shuffled_each_by_itself_and_begin_elsewhere_in_each_epoch(tmp_path):
    section = write(tmp_path, d=[1] * 40)
    it, _ = loader(section, buffer_size=8, shard_rows=3)
    epochs = [[items(it.next_window()) for _ in range(5)] for _ in range(4)]
    first = [[i for batch in window for i in batch] for window in epochs[0]]
    assert [sorted(window) for window in first] == [list(range(s, s + 8)) for s in range(0, 40, 8)]
    assert all(window != sorted(window) for window in first)
    neighbours = [{frozenset(i for b in w for i in b) for w in windows} for windows in epochs]
    assert len(set(map(frozenset, neighbours))) > 2


def test_without_shuffling_the_order_is_that_of_the_data_and_no_more_is_waited_for(tmp_path):
    section, seen = write(tmp_path, d=[1] * 40), []
    noting = lambda examples: seen.extend(examples) or encode(examples)  # noqa: E731
    it, _ = loader(section, shuffle=False, buffer_size=1000, shard_rows=3, encode=noting)
    assert flat(it.next_window()) == list(range(8))
    assert len(seen) == 9


def test_windows_made_ahead_are_those_made_on_the_spot_and_wait_for_no_encoding(tmp_path):
    section = write(tmp_path, d=[1, 2] * 20)
    threads = set()

    def more(found):
        threads.add(threading.current_thread())
        return next(found, None)

    def ahead(shards):
        data = open_stream(Encoding(section, encode, {}, 1), partial(more, shards))
        how = {"global_batch_size": 8, "micro_batch_size": 2, "seed": 1, "buffer_size": 6}
        return of(data, section, prefetch=Prefetch(noting), **how)

    def noting(window):
        made_by.append(threading.current_thread())
        return window

    made_by = []
    it = ahead(encode_stream(Encoding(section, encode, {}, 1), shard_rows=5))
    plain, _ = loader(section)
    for _ in range(20):
        assert it.state_dict() == plain.state_dict()
        assert items(it.next_window()) == items(plain.next_window())
    assert threads == {threading.main_thread()}
    assert len(set(made_by)) > 10
    it.load_state_dict(loader(section)[0].state_dict())
    assert items(it.next_window()) == items(loader(section)[0].next_window())


def test_the_first_step_waits_for_the_buffer_and_for_nothing_behind_it(tmp_path):
    section, seen = write(tmp_path, d=[1] * 40), []
    noting = lambda examples: seen.extend(examples) or encode(examples)  # noqa: E731
    it, _ = loader(section, buffer_size=16, shard_rows=4, encode=noting)
    it.next_window()
    assert len(seen) == 16
    it.next_window()
    assert len(seen) == 20, "whether that was the last window"


def test_held_out_rows_are_never_learnt_and_their_pieces_stay_together(tmp_path):
    section = write(tmp_path, d=[2] * 20)
    it, data = loader(section, val_size=3, buffer_size=15)
    held = sorted(data.evals[""][i]["input_ids"][0] for i in range(len(data.evals[""])))
    assert len(held) == 6
    assert len(set(held)) == 3
    assert max(held) < 7, "of the first 15 items the last belongs to a row that goes on"
    learnt = [i for _ in range(5) for i in flat(it.next_window())]
    assert (it.epoch, it.window) == (1, 0)
    assert sorted(learnt + held) == sorted([*range(20), *range(20)])
    again, _ = loader(section, val_size=3, buffer_size=15)
    assert np.array_equal(again.order.held_out, it.order.held_out)


def test_the_length_is_known_when_all_is_encoded(tmp_path):
    section = write(tmp_path, a=[1] * 9, b=[1] * 4)
    it, _ = loader(section)
    it.next_window()
    assert (it.num_examples, it.steps_per_epoch, it.progress) == (None, None, 0.0)
    it.next_window()
    assert (it.num_examples, it.steps_per_epoch, it.progress) == (13, 2, 1.0)
    it.next_window()
    assert it.progress == 1.5
    assert loader(section)[0].steps_per_epoch == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 2}, "train.seed was 2"),
        ({"buffer_size": 7}, "data.buffer_size was 7"),
        ({"val_size": 1}, "the number of examples that data.val_size holds out was 1"),
    ],
)
def test_a_position_in_another_order_is_refused(tmp_path, changes, reason):
    section = write(tmp_path, d=[1] * 40)
    other, _ = loader(section, **changes)
    other.next_window()
    with pytest.raises(DataError, match=reason):
        loader(section)[0].load_state_dict(other.state_dict())


def test_a_position_in_other_data_is_refused_but_not_for_data_that_was_added(tmp_path):
    it, _ = loader(write(tmp_path / "a", d=[1] * 40))
    it.next_window()
    state = it.state_dict()
    longer, _ = loader(write(tmp_path / "b", d=[1] * 41))
    longer.load_state_dict(state)
    assert flat(longer.next_window()) == flat(it.next_window())
    for name, copies in {"c": [2] + [1] * 39, "d": [1] * 3}.items():
        with pytest.raises(DataError, match="the fingerprint of the examples seen so far was"):
            loader(write(tmp_path / name, d=copies))[0].load_state_dict(state)


def test_nothing_is_computed_ahead_for_examples_that_are_still_encoded(tmp_path):
    _, data = loader(write(tmp_path, d=[1] * 20), val_size=3, buffer_size=15)
    assert [len(each) for each in data.evals.values()] == [3]
    assert data.whole is None
