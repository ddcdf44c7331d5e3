"""Orders and splits that depend on a few integers and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.data_order import hold_out, permutation
from surefoot.errors import DataError

SEEDS = st.integers(-(2**63), 2**64)


def splitmix64(value):
    """The generator as published (Steele, Lea and Flood 2014), in Python's own integers."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(length=st.integers(0, 60), seed=SEEDS, stream=st.integers(-1, 2**40))
def test_a_permutation_sorts_random_keys(length, seed, stream):
    mask = 2**64 - 1
    key = splitmix64(splitmix64(seed & mask) ^ (stream & mask))
    keys = [splitmix64((splitmix64(i ^ key) + key) & mask) for i in range(length)]
    expected = sorted(range(length), key=keys.__getitem__)
    assert permutation(length, seed=seed, stream=stream).tolist() == expected


def test_an_order_stays_the_same_for_ever():
    assert permutation(10, seed=42, stream=0).tolist() == [1, 4, 6, 0, 7, 5, 2, 3, 9, 8]


@given(
    rows=st.lists(st.integers(0, 20), min_size=2).filter(lambda r: len(set(r)) > 1),
    share=st.floats(0.01, 0.49),
    seed=SEEDS,
)
def test_the_pieces_of_a_row_stay_on_one_side(rows, share, seed):
    rows = np.array(sorted(rows))
    is_held = hold_out(rows, num_rows=21, val_size=share, seed=seed)
    held, kept = set(rows[is_held]), set(rows[~is_held])
    assert not held & kept
    assert len(held) == -(-len(set(rows)) * share // 1)
    assert (hold_out(rows, num_rows=21, val_size=share, seed=seed) == is_held).all()


def test_a_number_of_rows_is_held_out_and_another_seed_takes_others():
    rows = np.arange(100)
    first, second = (hold_out(rows, num_rows=100, val_size=30, seed=seed) for seed in (1, 2))
    assert first.sum() == second.sum() == 30
    assert (first != second).any()


@given(usable=st.sets(st.integers(0, 49), min_size=12), lost=st.integers(0, 49))
def test_a_row_that_is_no_longer_usable_moves_at_most_one_other(usable, lost):
    before, after = (
        set(np.array(rows)[hold_out(np.array(rows), num_rows=50, val_size=10, seed=3)])
        for rows in (sorted(usable), sorted(usable - {lost}))
    )
    assert before - after <= {lost}
    assert len(after - before) <= 1


@pytest.mark.parametrize("val_size", [3, 10, 0.9])
def test_holding_out_everything_is_an_error(val_size):
    with pytest.raises(
        DataError, match=r"val_size = .* leaves nothing to train on: found 3 usable rows"
    ):
        hold_out(np.array([4, 4, 5, 9]), num_rows=10, val_size=val_size, seed=1)
