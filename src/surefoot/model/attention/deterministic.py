"""Attention on a GPU that repeats its bits: torch's strict mode, for attention alone.

A run with ``train.deterministic`` has torch only warn of operations without a deterministic
algorithm, because some architectures contain one. But while torch only warns, its flash and
memory-efficient attention add the gradients of the queries in any order, and cuDNN's attention,
which has no such algorithm, may be selected. Both obey strict mode (torch 2.11, ``sdp_utils.cpp``
and ``attention_backward.cu``). So strict mode is on while an attention kernel is selected and
computes, forward and backward, and off everywhere else. Padded rows go through transformers' own
attention function, which stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

DEVICES = {"cuda"}  # attention of CPUs adds in a fixed order

Heads = Sequence[torch.Tensor]  # queries, keys and values


def deterministically(attend: Callable[[Heads], torch.Tensor], heads: Heads) -> torch.Tensor:
    """``attend(heads)``, forward and backward in strict mode if the run asks for deterministic
    kernels. Inside a compiled layer nothing changes: the mode is read when its graph is run."""
    if torch.compiler.is_compiling() or not _applies(heads[0].device):
        return attend(heads)
    inside = cast("Heads", _Enter.apply(*heads))  # type: ignore[no-untyped-call]
    with _strict():
        found = attend(inside)
    return cast("torch.Tensor", _Leave.apply(found))  # type: ignore[no-untyped-call]


def _applies(device: torch.device) -> bool:
    return (
        device.type in DEVICES
        and torch.are_deterministic_algorithms_enabled()
        and torch.is_deterministic_algorithms_warn_only_enabled()
    )


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


class _Enter(torch.autograd.Function):
    """The inputs; their backward pass is the last one of the attention, and leaves strict mode."""

    @staticmethod
    def forward(_ctx: Any, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.view_as(each) for each in heads)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return gradients


class _Leave(torch.autograd.Function):
    """The output; its backward pass is the first one of the attention, and enters strict mode."""

    @staticmethod
    def forward(_ctx: Any, found: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        return gradients[0]
