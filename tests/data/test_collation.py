"""Micro-batches, packed or padded."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.batch import IGNORE_INDEX
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate, pack, pad
from unpacked import unpack

TOKEN = st.integers(0, 2**31 - 1)
LABELLED = st.lists(st.tuples(TOKEN, TOKEN | st.just(IGNORE_INDEX)), min_size=1, max_size=9).map(
    lambda pairs: {"input_ids": [a for a, _ in pairs], "labels": [b for _, b in pairs]}
)
EXAMPLES = st.lists(LABELLED, min_size=1, max_size=6)


def without_first_label(item):
    return {**item, "labels": [IGNORE_INDEX, *item["labels"][1:]]}


@given(examples=EXAMPLES)
def test_unpacking_gives_back_the_examples(examples):
    assert unpack(pack(examples)) == [without_first_label(item) for item in examples]


@given(examples=EXAMPLES)
def test_a_packed_row_has_the_bounds_and_positions_of_its_documents(examples):
    batch = pack(examples)
    lengths = [len(item["input_ids"]) for item in examples]
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape
    assert batch.input_ids.shape == (1, sum(lengths))
    assert batch.attention_mask is None
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.diff().tolist() == lengths
    assert batch.cu_seqlens[0] == 0
    assert batch.position_ids[0].tolist() == [p for n in lengths for p in range(n)]
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}


@given(examples=EXAMPLES)
def test_nothing_is_lost_by_packing_or_padding(examples):
    for batch in (pack(examples), pad(examples)):
        assert batch.num_tokens == sum(len(item["input_ids"]) for item in examples)
        trained = sum(len(i["labels"]) - 1 - i["labels"][1:].count(IGNORE_INDEX) for i in examples)
        assert batch.num_trained == trained


@given(examples=EXAMPLES)
def test_padded_rows_are_the_examples(examples):
    batch = collate(in_memory(examples), packing=False)
    assert batch.cu_seqlens is None
    width = batch.input_ids.shape[1]
    for row, item in enumerate(without_first_label(item) for item in examples):
        length = len(item["input_ids"])
        assert batch.input_ids[row, :length].tolist() == item["input_ids"]
        assert batch.labels[row, :length].tolist() == item["labels"]
        assert (batch.labels[row, length:] == IGNORE_INDEX).all()
        assert batch.attention_mask[row].tolist() == [1] * length + [0] * (width - length)
        assert batch.position_ids[row].tolist() == list(range(width))
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.attention_mask.dtype} == {torch.int64}


def test_a_batch_is_its_own_copy():
    items = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    dataset = in_memory(items)
    for packing in (True, False):
        collate([dataset[0], dataset[1]], packing=packing).input_ids.zero_()
    assert dataset[1]["input_ids"].tolist() == [8, 9]
