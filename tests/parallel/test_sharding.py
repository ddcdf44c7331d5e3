"""What a process holds of a tensor follows from its cuts; together they hold it once."""

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.parallel.sharding import AxisShard, FusedSlice, axes, chunk, local_offset_and_shape

SIZES = {"dp_shard": 3, "tp": 2, "ep": 5}
cuts = st.permutations(list(SIZES)).flatmap(
    lambda axes: st.tuples(
        *(st.builds(AxisShard, axis=st.just(axis), dim=st.integers(0, 1)) for axis in axes)
    ).flatmap(lambda made: st.integers(0, 3).map(lambda count: made[:count]))
)


def places():
    for place in itertools.product(*(range(size) for size in SIZES.values())):
        yield dict(zip(SIZES, place, strict=True))


@given(st.integers(0, 200), st.integers(1, 40))
def test_chunks_are_those_of_torch(length, count):
    whole = torch.arange(length)
    pieces = [*torch.chunk(whole, count)] if length else []
    pieces += [whole[:0]] * (count - len(pieces))
    for index, piece in enumerate(pieces):
        first, size = chunk(length, count, index)
        assert torch.equal(whole[first : first + size], piece)


@given(st.tuples(st.integers(0, 23), st.integers(0, 23)), cuts)
def test_every_element_is_held_once_by_each_group_of_copies(shape, made):
    count = np.zeros(shape, int)
    for place in places():
        start, extent = local_offset_and_shape(shape, made, SIZES, place)
        count[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))] += 1
    copies = math.prod(size for axis, size in SIZES.items() if axis not in {c.axis for c in made})
    assert (count == copies).all()


@given(st.tuples(st.integers(1, 23), st.integers(1, 23)), cuts)
def test_a_cut_divides_what_the_one_before_has_left(shape, made):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for place in places():
        left = whole
        for cut in made:
            pieces = left.chunk(SIZES[cut.axis], cut.dim) if left.shape[cut.dim] else [left]
            empty = left.narrow(cut.dim, 0, 0)
            left = [*pieces, *[empty] * SIZES[cut.axis]][place[cut.axis]]
        start, extent = local_offset_and_shape(shape, made, SIZES, place)
        found = whole[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
        assert torch.equal(found, left)


def test_an_axis_that_is_not_there_cuts_nothing():
    assert local_offset_and_shape((7,), (AxisShard("tp", 0),), {}, {}) == ((0,), (7,))


three = st.permutations(list(SIZES)).flatmap(
    lambda names: st.tuples(
        *(st.builds(AxisShard, axis=st.just(n), dim=st.integers(0, 2)) for n in names)
    )
)


@given(st.data(), three)
def test_a_window_shows_what_is_held_of_the_larger_tensor(data, made):
    whole = np.arange(5 * 12 * 3).reshape(5, 12, 3)
    expert, row = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 11))
    height = data.draw(st.integers(1, 12 - row))
    window = FusedSlice(whole.shape, (expert, row, 0), made)
    count = np.zeros((height, 3), int)
    for place in places():
        start, extent = local_offset_and_shape((height, 3), window, SIZES, place)
        box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
        count[box] += 1
        outer, size = local_offset_and_shape(whole.shape, made, SIZES, place)
        here = whole[tuple(slice(a, a + n) for a, n in zip(outer, size, strict=True))]
        seen = whole[expert, row : row + height][box]
        assert set(seen.flat) == set(here.flat) & set(whole[expert, row : row + height].flat)
    assert (
        count == math.prod(size for axis, size in SIZES.items() if axis not in axes(made))
    ).all()
    assert axes(window) == axes(made)
