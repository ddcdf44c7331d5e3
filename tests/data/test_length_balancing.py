"""Examples of a window dealt to passes and ranks by their lengths."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot.data.order.loader import Loader, Shuffle
from surefoot.data.order.micro_batches import (
    Batching,
    Collation,
    balance_by_length,
    num_passes,
    positions,
)
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate

SHARED = Path(__file__).parents[3] / "shared" / "data"
WINDOWS = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(np.array)
SIZES = {
    "micro_batch_size": st.integers(1, 5),
    "world_size": st.integers(1, 6),
    "packing": st.booleans(),
}


def shares(lengths, *, world_size, packing, **sizes):
    """The items of each pass, by rank."""
    items, laid = np.arange(len(lengths)) + 100, Collation(collate, packing)
    ranks = [
        Batching(laid, rank=rank, world_size=world_size, **sizes) for rank in range(world_size)
    ]
    return [[items[group] for group in each.groups(lengths)] for each in ranks]


def by_number(lengths, *, micro_batch_size, world_size, **_):
    """The lengths of each group of a split by number alone."""
    return np.array_split(lengths, num_passes(len(lengths), micro_batch_size, world_size))


def size(lengths, packing):
    """What some items are laid out in."""
    return int(lengths.sum() if packing else lengths.max(initial=0) * len(lengths))


@given(lengths=WINDOWS, sizes=st.fixed_dictionaries(SIZES))
def test_every_item_is_in_one_group_and_all_ranks_have_equally_many(lengths, sizes):
    found = shares(lengths, **sizes)
    groups = [group for rank in found for group in rank]
    assert sorted(np.concatenate(groups) - 100) == list(range(len(lengths)))
    assert all((np.diff(group) > 0).all() for group in groups), "in the order of the window"
    assert {len(rank) for rank in found} == {len(by_number(lengths, **sizes)) // len(found)}
    assert all(map(len, groups)) or len(lengths) < len(groups)


@given(lengths=WINDOWS, sizes=st.fixed_dictionaries(SIZES))
def test_the_largest_group_is_never_larger_than_that_of_a_split_by_number(lengths, sizes):
    packing = sizes["packing"]
    groups = [group - 100 for rank in shares(lengths, **sizes) for group in rank]
    most = max(size(lengths[group], packing) for group in groups)
    assert most <= max(size(group, packing) for group in by_number(lengths, **sizes))
    if packing:  # any example that came last into its group came into the lightest
        rest = (len(groups) - 1) / len(groups) * lengths.max()
        assert most <= lengths.sum() / len(groups) + rest


@dataclass
class Proven:
    is_proven: bool = True


def groups_of_prompts(prompt_lengths, responses):
    """Examples of one response each, some to each prompt, of these lengths."""
    return [
        {"input_ids": [number] * prompt + [0] * response, "lengths": [prompt, response]}
        for number, prompt in enumerate(prompt_lengths)
        for response in responses[number]
    ]


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    responses=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=5),
    size_of_micro_batch=st.integers(1, 8),
    world_size=st.integers(1, 4),
)
def test_responses_that_share_a_prompt_are_dealt_together_where_ranks_wait_less(
    prompts, responses, size_of_micro_batch, world_size
):
    examples = groups_of_prompts(prompts, responses)
    lengths = np.array([len(item["input_ids"]) for item in examples])
    sizes = {"micro_batch_size": size_of_micro_batch, "world_size": world_size}

    def dealt(sharing):
        laid = Collation(collate, True, sharing)
        ranks = [Batching(laid, rank=rank, **sizes) for rank in range(world_size)]
        return [each.groups(lengths, examples) for each in ranks]

    def tokens(group):
        """Those of a row in which each prompt occurs once."""
        rows = [examples[i] for i in group]
        once = {row["input_ids"][0]: row["lengths"][0] for row in rows}
        return sum(once.values()) + sum(row["lengths"][1] for row in rows)

    def waited(ranks):
        return sum(max(map(tokens, groups)) for groups in zip(*ranks, strict=True))

    apart, together = dealt(Proven(False)), dealt(Proven())
    found = sorted(int(i) for rank in together for group in rank for i in group)
    assert found == list(range(len(examples)))
    assert {len(rank) for rank in together} == {len(apart[0])}
    unshared = sum(max(lengths[g].sum() for g in groups) for groups in zip(*apart, strict=True))
    assert waited(together) <= unshared
    most = max(tokens(group) for rank in together for group in rank)
    assert most <= max(each.sum() for each in by_number(lengths, **sizes))


def test_a_micro_batch_has_the_responses_of_one_prompt_if_it_has_room_for_them():
    examples = groups_of_prompts([30, 5, 8], [[3, 9], [1, 2], [4, 4]])
    lengths = np.array([len(item["input_ids"]) for item in examples])
    batching = Batching(Collation(collate, True, Proven()), micro_batch_size=2)
    groups = batching.groups(lengths, examples)
    assert [group.tolist() for group in groups] == [[0, 1], [4, 5], [2, 3]]


def splits_in_three(lengths):
    """[splits, items] whether each item is in the group, in all splits, of each of three groups."""
    splits = np.indices((3,) * len(lengths)).reshape(len(lengths), -1).T
    return [splits == group for group in range(3)]


@example(lengths=np.array([6, 6, 10, 10, 6, 8, 8]))
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7).map(np.array))
def test_no_split_at_all_has_less_than_three_quarters_in_its_largest_group(lengths):
    groups = balance_by_length(lengths[None], micro_batch_size=3, world_size=3, packing=True)
    best = np.max([(in_group * lengths).sum(1) for in_group in splits_in_three(lengths)], 0).min()
    largest = positions(lengths[None], groups, 3, packing=True).max()
    assert 9 * largest <= 11 * best  # 4/3 - 1/9 of it, reached here; as floats it is less than that


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7).map(np.array))
def test_no_split_at_all_has_a_smaller_largest_rectangle(lengths):
    groups = balance_by_length(lengths[None], micro_batch_size=3, world_size=3, packing=False)
    rectangles = [
        in_group.sum(1) * (in_group * lengths).max(1) for in_group in splits_in_three(lengths)
    ]
    best = np.max(rectangles, 0).min()
    assert positions(lengths[None], groups, 3, packing=False).max() == best


@given(
    windows=st.lists(st.lists(st.integers(1, 60), min_size=9, max_size=9), min_size=1, max_size=5),
    sizes=st.fixed_dictionaries(SIZES),
)
def test_windows_dealt_at_once_are_dealt_as_one_by_one(windows, sizes):
    windows = np.array(windows)
    at_once = balance_by_length(windows, **sizes)
    assert np.array_equal(
        at_once, np.concatenate([balance_by_length(w[None], **sizes) for w in windows])
    )
    assert np.array_equal(at_once, balance_by_length(windows.copy(), **sizes))


@given(lengths=WINDOWS, sizes=st.fixed_dictionaries(SIZES))
def test_the_heaviest_run_first_and_at_the_same_time(lengths, sizes):
    found = shares(lengths, **sizes)
    weights = [[size(lengths[g - 100], sizes["packing"]) for g in rank] for rank in found]
    passes = list(zip(*weights, strict=True))
    for one, later in pairwise(passes):
        assert min(one) >= max(later)


def test_one_process_with_one_pass_has_the_window_as_it_is():
    (only,) = shares(np.array([5, 9, 2, 7]), micro_batch_size=4, world_size=1, packing=True)
    assert [group.tolist() for group in only] == [[100, 101, 102, 103]]


def test_packed_rows_are_equally_long_and_rectangles_hold_equal_lengths():
    lengths = np.array([90, 10, 20, 30, 40, 10, 20, 20])
    sizes = {"micro_batch_size": 4, "world_size": 2}
    packed, padded = (shares(lengths, packing=packing, **sizes) for packing in (True, False))
    assert [lengths[g - 100].sum() for (g,) in packed] == [120, 120]
    assert [sorted(lengths[g - 100]) for (g,) in padded] == [[40, 90], [10, 10, 20, 20, 20, 30]]


def dealt(it, epoch, window):
    """The items of each of a rank's micro-batches."""
    examples = it.examples_at(epoch, window)
    return [examples.items[group] for group in it.batching.groups(examples.lengths)]


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_has_the_same_examples_on_any_number_of_ranks(packing):
    lengths = np.random.default_rng(1).integers(2, 40, 53)
    data = in_memory([{"input_ids": [i] * n, "labels": [i] * n} for i, n in enumerate(lengths)])
    seen = []
    for ranks in (1, 2, 3, 4):
        sizes = {"micro_batch_size": 2, "world_size": ranks}
        each = [Batching(Collation(collate, packing), rank=rank, **sizes) for rank in range(ranks)]
        loaders = [Loader(Shuffle(data, 1), batching, global_batch_size=24) for batching in each]
        groups = [[dealt(it, epoch, w) for it in loaders] for epoch in (0, 1) for w in range(3)]
        seen.append([sorted(np.concatenate([g for r in step for g in r])) for step in groups])
    assert seen[0] == seen[1] == seen[2] == seen[3]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared with real data")
def test_of_real_examples_eight_ranks_wait_for_each_other_no_more():
    rows = json.loads((SHARED / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    lengths = np.array([len(json.dumps(row)) // 4 for row in rows])[:960].reshape(-1, 32)
    groups = balance_by_length(lengths, micro_batch_size=4, world_size=8, packing=True)
    loads = positions(lengths, groups, 8, packing=True)
    before = lengths.reshape(-1, 8, 4).sum(2)
    assert before.mean() / before.max(1).mean() < 0.7
    assert loads.mean() / loads.max(1).mean() > 0.95
