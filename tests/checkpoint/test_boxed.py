"""What a process holds of a tensor, and whether it writes it."""

import torch

from surefoot.checkpoint.box import Box
from surefoot.checkpoint.boxed import part


def test_a_plain_tensor_is_whole_everywhere_and_written_by_the_first():
    tensor = torch.randn(3, 2)
    for is_main in (True, False):
        found = part("x", tensor, is_main=is_main)
        assert (found.values is tensor, found.box, found.is_mine) == (
            True,
            Box.whole((3, 2)),
            is_main,
        )
