"""What a process holds of a tensor is what ``torch.chunk`` gives it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.box import Box
from surefoot.checkpoint.boxed import chunk, part


@given(st.integers(0, 200), st.integers(1, 40))
def test_chunks_are_those_of_torch(length, count):
    whole = torch.arange(length)
    pieces = [*torch.chunk(whole, count)] if length else []
    pieces += [whole[:0]] * (count - len(pieces))
    for index, piece in enumerate(pieces):
        first, size = chunk(length, count, index)
        assert torch.equal(whole[first : first + size], piece)


def test_a_plain_tensor_is_whole_everywhere_and_written_by_the_first():
    tensor = torch.randn(3, 2)
    for is_main in (True, False):
        found = part("x", tensor, is_main=is_main)
        assert (found.values is tensor, found.box, found.is_mine) == (
            True,
            Box.whole((3, 2)),
            is_main,
        )
