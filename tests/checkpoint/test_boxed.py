"""What a process holds of a tensor."""

import torch

from surefoot.checkpoint.box import Box
from surefoot.checkpoint.boxed import part


def test_a_plain_tensor_is_whole_in_every_process():
    tensor = torch.randn(3, 2)
    found = part("x", tensor)
    assert found.values is tensor
    assert (found.shape, found.box) == ((3, 2), Box.whole((3, 2)))


def test_a_part_can_be_narrowed_and_stays_the_same_memory():
    tensor = torch.arange(12.0).reshape(4, 3).requires_grad_()
    found = part("x", tensor).narrowed(Box((1, 0), (2, 3)))
    assert torch.equal(found.values, tensor.detach()[1:3])
    assert found.values.data_ptr() == tensor[1].data_ptr()
    again = found.narrowed(Box((2, 1), (1, 2)))
    assert again.values.tolist() == [[7.0, 8.0]]
    assert again.shape == (4, 3)
