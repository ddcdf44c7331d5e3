"""Pairs of answers: joined, taken apart, and laid in batches."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from surefoot.batch import IGNORE_INDEX
from surefoot.data.order.micro_batches import Batching, Collation, in_turn
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate, collate_pairs, join, split

TOKEN = st.integers(0, 9)
LABELLED = st.lists(st.tuples(TOKEN, st.booleans()), min_size=1, max_size=6)


def item(tokens):
    """Tokens with a label where it is said."""
    ids = [token for token, _ in tokens]
    return {"input_ids": ids, "labels": [t if told else IGNORE_INDEX for t, told in tokens]}


def lists(features):
    return {name: [int(x) for x in part] for name, part in features.items()}


def without_first_label(features):
    return {**features, "labels": [IGNORE_INDEX, *features["labels"][1:]]}


@st.composite
def conversations(draw):
    """Two that begin alike, with or without labels on what is alike."""
    prompt = draw(LABELLED)
    if draw(st.booleans()):
        prompt = [(token, False) for token, _ in prompt]
    chosen, rejected = (draw(LABELLED | st.just([])) for _ in range(2))
    assume(len(prompt) > 1 or (chosen and rejected))
    return item(prompt + chosen), item(prompt + rejected)


@st.composite
def pairs(draw):
    return join(*draw(conversations()))


@given(both=conversations())
def test_a_pair_taken_apart_gives_back_both_conversations(both):
    pair = join(*both)
    assert [lists(one) for one in split(pair)] == [without_first_label(one) for one in both]


@given(both=conversations())
def test_what_is_shared_is_as_long_as_it_can_be(both):
    pair = join(*both)
    prompt, *answers = pair["lengths"]
    assert prompt >= 1
    assert min(answers) >= 1
    assert len(pair["input_ids"]) == len(pair["labels"]) == prompt + sum(answers)
    assert set(pair["labels"][:prompt]) == {IGNORE_INDEX}
    if min(answers) > 1:  # what comes next differs or is to be learnt
        tokens = {one["input_ids"][prompt] for one in both}
        labels = {one["labels"][prompt] for one in both}
        assert len(tokens) == 2 or labels != {IGNORE_INDEX}


@pytest.mark.parametrize(
    ("chosen", "rejected"), [([1, 2], [3, 2]), ([1], [1, 2]), ([1], [1])], ids=str
)
def test_what_shares_no_prompt_is_no_pair(chosen, rejected):
    both = [{"input_ids": ids, "labels": ids} for ids in (chosen, rejected)]
    with pytest.raises(ValueError, match="no prompt in common"):
        join(*both)


@given(found=st.lists(pairs(), min_size=1, max_size=4))
def test_a_rectangle_has_two_rows_for_each_pair(found):
    batch = collate_pairs(in_memory(found), packing=False)
    expected = collate([row for pair in found for row in split(pair)], packing=False)
    for name in ("input_ids", "labels", "position_ids", "attention_mask"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))


@given(found=st.lists(pairs(), min_size=1, max_size=4), packing=st.booleans())
def test_each_trained_position_knows_its_answer(found, packing):
    batch = collate_pairs(found, packing=packing)
    at = batch.located().at
    answer, lengths = batch.extras["answer"], batch.extras["answer_lengths"]
    assert {answer.dtype, lengths.dtype} == {torch.int64}
    assert len(answer) == len(at.columns) == batch.num_trained
    assert torch.equal(torch.bincount(answer, minlength=2 * len(found)), lengths)
    counts = [sum(x != IGNORE_INDEX for x in row["labels"]) for p in found for row in split(p)]
    assert lengths.tolist() == counts


@pytest.mark.parametrize("packing", [True, False])
def test_where_no_pair_is_left_for_a_process_no_answer_counts(packing):
    laid = Collation(collate_pairs, packing)
    pair = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "lengths": [2, 1, 1]}
    (group,) = in_turn(1, 1, rank=1, world_size=2)
    evaluated = laid.batch_of(group, in_memory([pair]))
    (dealt,) = Batching(laid, micro_batch_size=1, rank=1, world_size=2).window([pair])
    for batch in (evaluated, dealt):
        assert batch.num_trained == 0
        assert batch.extras["answer"].tolist() == []
        assert batch.extras["answer_lengths"].tolist() == [0, 0]
        assert batch.num_tokens == laid.batch([pair]).num_tokens
