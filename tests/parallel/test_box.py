"""Boxes: intersections, cuts and runs agree with what numpy does when it slices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.parallel.sharding import Box, is_covered_once

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    starts = [draw(st.integers(0, n)) for n in shape]
    return Box(
        tuple(starts),
        tuple(draw(st.integers(0, n - a)) for a, n in zip(starts, shape, strict=True)),
    )


@st.composite
def shapes_and_boxes(draw, count=1):
    shape = draw(SHAPES)
    return shape, *(draw(boxes(shape)) for _ in range(count))


def marks(shape, box):
    """An array with ones where the box is."""
    array = np.zeros(shape, int)
    array[box.slices_in(Box.whole(shape))] = 1
    return array


@given(shapes_and_boxes())
def test_a_box_selects_as_many_elements_as_it_says(case):
    shape, box = case
    assert marks(shape, box).sum() == box.size


@given(shapes_and_boxes(count=2))
def test_the_common_part_is_what_both_select(case):
    shape, one, other = case
    both = marks(shape, one) & marks(shape, other)
    common = one & other
    assert both.sum() == (common.size if common else 0)
    if common is not None:
        assert np.array_equal(marks(shape, common), both)
        assert common in one and common in other


@given(shapes_and_boxes(count=2))
def test_a_box_contains_another_if_all_of_it_lies_inside(case):
    shape, one, other = case
    inside = bool((marks(shape, other) <= marks(shape, one)).all())
    if other.size:
        assert (other in one) == inside


@given(shapes_and_boxes())
def test_the_runs_of_a_box_are_its_elements_in_row_major_order(case):
    shape, box = case
    whole = Box.whole(shape)
    flat = np.arange(whole.size)
    found = [i for first, count in box.runs_in(whole) for i in flat[first : first + count]]
    assert found == flat.reshape(shape)[box.slices_in(whole)].reshape(-1).tolist()


def test_whole_rows_are_one_run():
    assert list(Box((2, 0, 0), (3, 4, 5)).runs_in(Box.whole((9, 4, 5)))) == [(40, 60)]


def test_columns_are_one_run_a_row():
    assert list(Box((0, 1), (3, 2)).runs_in(Box.whole((3, 4)))) == [(1, 2), (5, 2), (9, 2)]


@given(SHAPES, st.integers(1, 40))
def test_blocks_are_small_and_contiguous_and_follow_each_other(shape, limit):
    whole = Box.whole(shape)
    blocks = list(whole.blocks(limit))
    runs = [run for block in blocks for run in block.runs_in(whole)]
    assert all(block.size <= limit for block in blocks)
    assert sum(count for _, count in runs) == whole.size
    assert [first for first, _ in runs] == [sum(c for _, c in runs[:i]) for i in range(len(runs))]
    assert len(runs) == len([b for b in blocks if b.size])


@given(shapes_and_boxes(), st.integers(1, 20))
def test_blocks_of_a_part_stay_inside_it(case, limit):
    _, box = case
    assert sum(block.size for block in box.blocks(limit)) == box.size
    assert all(block in box for block in box.blocks(limit))


def test_a_scalar_is_a_box_of_one():
    scalar = Box.whole(())
    assert scalar.size == 1
    assert list(scalar.runs_in(scalar)) == [(0, 1)]
    assert list(scalar.blocks(1)) == [scalar]
    assert (scalar & scalar) == scalar


@pytest.mark.parametrize(
    ("start", "shape"), [((0,), ()), ((0, 0), (1,)), ((-1,), (2,)), ((0,), (-2,))]
)
def test_what_is_no_box_cannot_be_made(start, shape):
    with pytest.raises(ValueError, match="start"):
        Box(start, shape)


@st.composite
def cuts(draw):
    """A box cut again and again, anywhere, and perhaps spoilt; in any order."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    parts = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for start, length in ((0, at), (at, box.shape[dim] - at)):
            if length:
                first, size = list(box.start), list(box.shape)
                first[dim] += start
                size[dim] = length
                parts.append(Box(tuple(first), tuple(size)))
    if draw(st.booleans()):
        parts += draw(st.lists(boxes(shape), max_size=2))
    if draw(st.booleans()) and parts:
        parts.pop()
    return shape, draw(st.permutations(parts))


@given(cuts())
def test_boxes_cover_a_tensor_once_if_counting_says_so(case):
    shape, parts = case
    count = sum((marks(shape, box) for box in parts), np.zeros(shape, int))
    holds_none = any(not box.size for box in parts)
    assert is_covered_once(Box.whole(shape), parts) == (bool((count == 1).all()) and not holds_none)


def test_boxes_outside_or_of_other_dimensions_cover_nothing():
    whole = Box.whole((2, 2))
    assert not is_covered_once(whole, [Box((0, 0), (2, 3))])
    assert not is_covered_once(whole, [Box((0,), (4,))])
    assert not is_covered_once(whole, [])


def test_an_empty_tensor_is_one_box():
    empty = Box.whole((0, 3))
    assert is_covered_once(empty, [empty])
    assert not is_covered_once(empty, [empty, empty])
    assert not is_covered_once(empty, [])


def test_cuts_along_too_many_dimensions_are_refused_at_once():
    whole = Box.whole((2,) * 40)
    assert not is_covered_once(whole, [Box((0,) * 40, (1,) * 40), Box((1,) * 40, (1,) * 40)])
    halves = [Box((i, *[0] * 39), (1, *[2] * 39)) for i in range(2)]
    assert is_covered_once(whole, halves)
