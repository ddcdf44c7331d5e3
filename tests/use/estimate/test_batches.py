"""Steps, tokens and the heaviest micro-batch, against the batches that a run really gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.order.loader import Loader, Shuffle
from surefoot.data.order.micro_batches import Batching, Collation
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate, collate_pairs
from surefoot.errors import DataError
from surefoot.recipe.recipe import read
from surefoot.use.estimate._batches import (
    course_of,
    heaviest,
    loader_of,
    token_counts,
    trained_counts,
)

from . import scene


def recipe(packing=True, **train):
    return read(
        {
            "model": {"path": "none"},
            "data": {"datasets": ["none"], "packing": packing},
            "stage": "sft",
            "train": {"output_dir": "none", **train},
        }
    )


@pytest.fixture(scope="module")
def parts_of(tmp_path_factory):
    """The parts of a run, of which nothing but its examples and their order is looked at."""
    known = scene.parts(scene.recipe(tmp_path_factory.mktemp("batches")))
    return lambda made: replace(known, train=made.train, data=made.data, stage=made.stage)


def dataset(lengths, seed=0):
    draw = np.random.default_rng(seed)
    items = []
    for length in lengths:
        labels = np.where(draw.random(length) < 0.5, -100, 5)
        items.append({"input_ids": [3] * length, "labels": labels.tolist()})
    return in_memory(items)


def every_batch(made, items, ranks, steps):
    """All micro-batches of all processes, as their loaders give them."""
    loaders = [
        Loader(
            Shuffle(items, made.train.seed),
            Batching(
                Collation(collate, made.data.packing),
                micro_batch_size=made.train.micro_batch_size,
                rank=rank,
                world_size=ranks,
            ),
            global_batch_size=made.train.global_batch_size,
        )
        for rank in range(ranks)
    ]
    return [b for loader in loaders for _ in range(steps) for b in loader.next_window()]


@settings(max_examples=40)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=40),
    st.sampled_from([(8, 2, 1), (8, 2, 2), (6, 3, 2), (4, 4, 1), (4, 1, 4)]),
    st.booleans(),
    st.sampled_from([{"num_epochs": 2}, {"num_epochs": 1.5}, {"max_steps": 3}]),
)
def test_figures_are_those_of_the_batches_that_come(parts_of, lengths, sizes, packing, how_long):
    whole, micro, ranks = sizes
    made = parts_of(recipe(packing, global_batch_size=whole, micro_batch_size=micro, **how_long))
    items = dataset(lengths)
    loader, trained = loader_of(made, items, ranks), trained_counts(items)
    course = course_of(made, loader, items.lengths, trained)
    batches = [b for b in every_batch(made, items, ranks, course.steps) if b.num_trained]
    learnt = sum(b.num_trained for b in batches)
    assert course.trained_tokens == learnt
    counted = sum(b.num_tokens for b in batches)
    assert counted <= course.tokens, "a batch that teaches nothing is not counted by a run"
    if trained.all():
        assert counted == course.tokens
    found = heaviest(loader, course.steps, items.lengths, trained)
    here = collate([items[int(i)] for i in found], packing=packing)
    most = max(b.input_ids.numel() for b in every_batch(made, items, ranks, course.steps))
    assert here.input_ids.numel() == most or most <= max(lengths), "a filler is no batch"
    only = heaviest(loader, course.steps, items.lengths, trained, logit_weight=1e6)
    assert trained[only].sum() == max((b.num_trained for b in batches), default=0)


def test_the_first_position_is_never_learnt():
    items = in_memory(
        [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [1], "labels": [1]}]
    )
    assert trained_counts(items).tolist() == [2, 0]


def test_many_examples_are_counted_piece_by_piece(monkeypatch):
    items = dataset(range(2, 40))
    expected = trained_counts(items)
    monkeypatch.setattr("surefoot.use.estimate._batches._ITEMS", 7)
    assert trained_counts(items).tolist() == expected.tolist()


def test_batches_that_do_not_divide_are_refused_as_in_training(parts_of):
    made = parts_of(recipe(global_batch_size=8, micro_batch_size=4))
    with pytest.raises(
        DataError, match=r"multiple of train\.micro_batch_size x data-parallel ranks"
    ):
        loader_of(made, dataset([5] * 9), 3)


@pytest.mark.parametrize("packing", [True, False])
def test_a_prompt_counts_as_often_as_it_is_computed(parts_of, packing):
    pairs = [
        {"input_ids": [*range(sum(lengths))], "labels": [0] * sum(lengths), "lengths": lengths}
        for lengths in ([2, 3, 4], [7, 1, 1])
    ]
    items = in_memory(pairs)
    counts = token_counts(parts_of(recipe(packing)), items)
    laid = [collate_pairs([pair], packing=packing).num_tokens for pair in pairs]
    assert counts.tolist() == laid == ([9, 9] if packing else [11, 16])
