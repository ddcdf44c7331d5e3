"""A part of a tensor, or its edges, as numpy would cut them; and no more is read."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.looking.tensor_stats import EDGE, MAX_READ, excerpt
from surefoot.checkpoint.sources.source import TensorsInMemory
from surefoot.errors import CheckpointError
from surefoot.parallel.box import select


class Counting:
    """A source that counts what is read of it."""

    def __init__(self, tensor):
        self.inner, self.num_read = TensorsInMemory({"x": tensor}), 0

    def shapes(self):
        return self.inner.shapes()

    def read(self, name, box):
        self.num_read += box.size
        return self.inner.read(name, box)


def edges(array):
    """The first and last values along every dimension that has more."""
    for dim in range(array.ndim):
        size = array.shape[dim]
        if size > 2 * EDGE:
            array = np.take(array, [*range(EDGE), *range(size - EDGE, size)], axis=dim)
    return array


@given(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.lists(st.sampled_from([":", "::2", "1:", "1::3", "0"]), max_size=3),
    st.integers(0, 200),
)
def test_an_excerpt_is_the_slice_or_its_edges(shape, parts, limit):
    tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    text = ", ".join(part if n else ":" for part, n in zip(parts, shape, strict=False))
    selection = select(text, shape)
    source = Counting(tensor)
    found = excerpt(source, "x", selection, limit)
    index = tuple(
        int(p) if p == "0" else slice(*(int(x) if x else None for x in p.split(":")))
        for p in text.split(", ")
        if p
    )
    expected = tensor.numpy()[index]
    is_cut = expected.size > limit
    assert found.is_cut == tuple(is_cut and n > 2 * EDGE for n in expected.shape)
    np.testing.assert_array_equal(found.values, edges(expected) if is_cut else expected)
    assert source.num_read <= tensor.numel()


def test_the_edges_of_a_huge_tensor_are_read_alone():
    tensor = torch.zeros(1).expand(1 << 20, 1 << 20)
    source = Counting(tensor)
    found = excerpt(source, "x", select("", (1 << 20, 1 << 20)), 1000)
    assert found.values.shape == (6, 6) and source.num_read == 36


def test_what_would_need_too_much_memory_is_refused():
    shape = (MAX_READ * 2,)
    tensor = torch.zeros(1).expand(shape)
    with pytest.raises(CheckpointError, match="take a smaller slice"):
        excerpt(Counting(tensor), "x", select(f"::{MAX_READ}", shape), 1000)
    shape = tuple(itertools.repeat(7, 8))
    with pytest.raises(CheckpointError, match="take a smaller slice"):
        excerpt(Counting(torch.zeros(1).expand(shape)), "x", select("", shape), 1000)
