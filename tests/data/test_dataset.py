"""Items in flat arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.store.dataset import EncodedDataset, in_memory, join

ITEMS = st.lists(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(
        lambda ids: {"input_ids": ids, "labels": [-100] * len(ids), "weight": [7]}
    ),
    min_size=1,
    max_size=6,
)


def plain(item):
    return {name: list(values) for name, values in item.items()}


@given(parts=st.lists(ITEMS, min_size=1, max_size=4), picks=st.data())
def test_items_come_back_as_they_were_whatever_store_they_are_in(parts, picks):
    whole = join([in_memory(items).stores[0] for items in parts])
    flat = [item for items in parts for item in items]
    assert [plain(whole[i]) for i in range(len(whole))] == flat
    index = picks.draw(st.lists(st.integers(0, len(flat) - 1)))
    chosen = EncodedDataset(whole.stores, np.array(index, np.int64))
    assert [plain(chosen[i]) for i in range(len(chosen))] == [flat[i] for i in index]
    assert chosen.lengths.tolist() == [len(flat[i]["input_ids"]) for i in index]


def test_items_are_views_of_the_store():
    dataset = in_memory([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    item = dataset[1]["input_ids"]
    assert item.dtype == np.int32
    assert np.shares_memory(item, dataset.stores[0].features["input_ids"].flat)


def test_the_length_of_an_item_counts_all_its_sequences():
    pair = {"chosen_input_ids": [1, 2], "chosen_labels": [1, 2], "rejected_input_ids": [1, 2, 3]}
    assert in_memory([pair]).lengths.tolist() == [5]


def test_the_fingerprint_tells_items_and_orders_apart():
    items = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    dataset = in_memory(items)
    others = [
        in_memory([{"input_ids": [1]}, {"input_ids": [2, 3]}]),
        in_memory([{"input_ids": [1, 2]}, {"input_ids": [4]}]),
        in_memory([{"labels": [1, 2]}, {"labels": [3]}]),
        EncodedDataset(dataset.stores, np.array([1, 0])),
        EncodedDataset(dataset.stores, np.array([0])),
    ]
    assert len({dataset.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert in_memory(items).fingerprint == dataset.fingerprint


def test_no_items_are_a_dataset_too():
    assert len(in_memory([])) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bytes_and_floats_lie_beside_tokens(dtype):
    items = [
        {"input_ids": [], "answer": b"", "values": np.array([], dtype)},
        {"input_ids": [1, 2], "answer": "ü".encode(), "values": np.array([0.1, 1e-7], dtype)},
    ]
    found = in_memory(items)[1]
    assert {name: column.dtype for name, column in found.items()} == {
        "input_ids": np.int32,
        "answer": np.uint8,
        "values": dtype,
    }
    assert bytes(found["answer"]).decode() == "ü"
    assert found["values"].tolist() == items[1]["values"].tolist()


@given(parts=st.lists(ITEMS, min_size=1, max_size=3))
def test_items_of_equal_tokens_have_equal_sketches(parts):
    """Wherever they are, and whatever stands beside them."""
    sketches = join([in_memory(items).stores[0] for items in parts]).sketches.tolist()
    flat = [item["input_ids"] for items in parts for item in items]
    assert sketches == [in_memory([{"input_ids": ids}]).sketches[0] for ids in flat]


def test_items_of_other_tokens_have_other_sketches():
    pairs = [([1, 2, 3], [1, 2]), ([1, 2, 3], [3, 2, 1]), ([0], []), ([7] * 6000, [7] * 5999 + [8])]
    for one, other in pairs:
        assert len(set(in_memory([{"input_ids": i} for i in (one, other)]).sketches.tolist())) == 2
