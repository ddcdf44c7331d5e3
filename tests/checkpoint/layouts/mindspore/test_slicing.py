import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import CheckpointError
from surefoot.parallel.box import Box, is_covered_once
from surefoot.plugins.mindspore.strategy import ALL_COPIES, TensorLayout


def boxes(layout, shape):
    return [layout.box(shape, device) for device in range(layout.num_devices)]


def test_axes_are_counted_from_the_right():
    layout = TensorLayout((2, 3), ((0, -1),))
    assert [box.start for box in boxes(layout, (6, 4))] == [(0, 0), (2, 0), (4, 0)] * 2


def test_of_two_axes_on_one_dimension_the_first_counts_most():
    layout = TensorLayout((2, 3), ((1, 0), (-1,)))
    assert [box.start[0] for box in boxes(layout, (6, 4))] == [0, 1, 2, 3, 4, 5]
    turned = TensorLayout((2, 3), ((0, 1), (-1,)))
    assert [box.start[0] for box in boxes(turned, (6, 4))] == [0, 2, 4, 1, 3, 5]


def test_the_optimizer_cuts_what_the_matrix_leaves():
    layout = TensorLayout((2, 2), ((0, -1),), ALL_COPIES)
    assert [box.start[0] for box in boxes(layout, (8, 4))] == [0, 4, 2, 6]


def test_two_of_four_copies_are_the_inner_ones():
    layout = TensorLayout((4,), ((-1,),), 2)
    assert [box.start[0] for box in boxes(layout, (8,))] == [0, 4, 0, 4]


def test_the_optimizer_takes_copies_that_are_not_neighbours():
    layout = TensorLayout((2, 2, 2), ((1, -1),), ALL_COPIES)
    assert [box.start[0] for box in boxes(layout, (8, 4))] == [0, 1, 4, 5, 2, 3, 6, 7]


@given(
    matrix=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    dims=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    shards=st.sampled_from([0, ALL_COPIES]),
    data=st.data(),
)
def test_the_devices_hold_all_of_a_tensor_and_their_part_tells_the_whole(
    matrix, dims, shards, data
):
    free = data.draw(st.permutations(range(len(matrix))))
    maps = [free.pop() if free and data.draw(st.booleans()) else -1 for _ in dims]
    layout = TensorLayout(tuple(matrix), (tuple(maps),), shards)
    shape = tuple(n * count for n, count in zip(dims, layout.counts(len(dims)), strict=True))
    found = boxes(layout, shape)
    assert is_covered_once(Box.whole(shape), sorted(set(found)))
    assert {layout.whole(box.shape) for box in found} == {shape}


@pytest.mark.parametrize(
    ("layout", "shape", "problem"),
    [
        (TensorLayout((2,), ((0,),)), (3,), "a dimension of 3 is not 2 equal parts"),
        (TensorLayout((2,), ((0,), (-1,))), (4,), "sharded in 2 dimensions and has 1"),
        (TensorLayout((2,), ((5,),)), (4,), "does not fit the devices 2"),
        (TensorLayout((2, 2), ((0, 0),)), (4, 4), "does not fit the devices 2 x 2"),
        (TensorLayout((2, 2), ((0,),), 4), (8,), "4 shards of the optimizer do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(layout, shape, problem):
    with pytest.raises(CheckpointError, match=problem):
        layout.box(shape, 0)
