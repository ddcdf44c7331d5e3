"""Micro-batches, packed or padded."""

import torch
from hypothesis import given
from test_packing import EXAMPLES, without_first_label

from surefoot.batch import IGNORE_INDEX
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate

ITEMS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"input_ids": [8, 9], "labels": [8, 9]},
]


def test_padding_fills_up_on_the_right():
    batch = collate(ITEMS, packing=False)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7], [-100, 9, -100]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.cu_seqlens is None


def test_packing_lays_end_to_end():
    batch = collate(ITEMS, packing=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[-100, 6, 7, -100, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]


@given(examples=EXAMPLES)
def test_padded_rows_are_the_examples(examples):
    batch = collate(in_memory(examples), packing=False)
    for row, item in enumerate(without_first_label(item) for item in examples):
        length = len(item["input_ids"])
        assert batch.input_ids[row, :length].tolist() == item["input_ids"]
        assert batch.labels[row, :length].tolist() == item["labels"]
        assert (batch.labels[row, length:] == IGNORE_INDEX).all()
        assert batch.attention_mask[row].sum() == length
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.attention_mask.dtype} == {torch.int64}


def test_a_batch_is_its_own_copy():
    dataset = in_memory(ITEMS)
    for packing in (True, False):
        collate([dataset[0], dataset[1]], packing=packing).input_ids.zero_()
    assert dataset[1]["input_ids"].tolist() == [8, 9]
