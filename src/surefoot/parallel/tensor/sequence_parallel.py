"""Sequence parallelism: between the blocks of cut matrices, each process of ``tp`` has a part of
the tokens only.

Inside a block (attention, MLP) a process sees all tokens and a part of each matrix, as ever. Around
it norms and sums are the same for every token, so they need not be done, and kept for the backward
pass, by all: the block joins the parts of the tokens where it begins, and its last matrix leaves
each process its part of the sum, which costs what the sum alone cost (arXiv:2205.05198). Weights
that see a part of the tokens have a part of the gradient; it is summed.

In a pipeline, what passes from stage to stage is the part as well: nothing is joined where a stage
ends. But the model's own code asks what enters it how many tokens there are, for masks and
positions, before the first layer of the stage sees it. So the part enters in its place among zeros.

Parts are equal: a batch whose length does not divide is filled up on the right, where nothing looks
back from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ...batch import IGNORE_INDEX, Batch
from ...errors import RecipeError
from ..collectives import (
    Axis,
    gather_from_sequence_region,
    gather_from_tp_region,
    scatter_to_tp_region,
)
from .tp_plan import ModulePlan

TOKENS = 1  # the dimension of tokens
_INPUT = "hidden_states"  # what transformers calls the input of a layer or block
Forward = Callable[..., object]


def widened(batch: Batch, multiple: int) -> Batch:
    """``batch`` with a length that ``multiple`` divides: what is added is padding, or in a packed
    row a document of its own, and trains nothing."""
    length = batch.input_ids.shape[1]
    more = -length % multiple
    if not more:
        return batch
    mask, bounds, branches = batch.attention_mask, batch.cu_seqlens, batch.branches
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, more)),
        labels=F.pad(batch.labels, (0, more), value=IGNORE_INDEX),
        position_ids=F.pad(batch.position_ids, (0, more)),
        attention_mask=None if mask is None else F.pad(mask, (0, more)),
        cu_seqlens=None if bounds is None else F.pad(bounds, (0, 1), value=length + more),
        branches=None
        if branches is None
        else torch.cat([branches, branches.new_tensor([[more, 0, 0]])]),
    )


def first_layer(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """The first layer takes its part of the tokens."""

    def take(x_BTH: torch.Tensor) -> torch.Tensor:
        if x_BTH.shape[TOKENS] % axis.size:  # the others would wait for parts of another size
            raise ValueError(f"{x_BTH.shape[TOKENS]} tokens are not {axis.size} equal parts")
        return scatter_to_tp_region(x_BTH, axis, TOKENS)

    _before(role.module, take)


def placed(x_BtH: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[B, T, H]: a part of the tokens in its place among all of them, the others zero."""
    tokens = x_BtH.shape[TOKENS]
    before = axis.rank * tokens
    return F.pad(x_BtH, (0, 0, before, (axis.size - 1) * tokens - before))


def entered_layer(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """The first layer of a later stage has its part of the tokens from what is ``placed``."""

    def take(x_BTH: torch.Tensor) -> torch.Tensor:
        tokens = x_BTH.shape[TOKENS] // axis.size
        return x_BTH.narrow(TOKENS, axis.rank * tokens, tokens)

    _before(role.module, take)


def last_layer(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """After the last layer all processes have all tokens."""
    forward: Forward = role.module.forward

    def whole(*arguments: object, **named: object) -> object:
        x_BtH = _checked(forward(*arguments, **named), role.module)
        return gather_from_tp_region(x_BtH, axis, x_BtH.shape[TOKENS] * axis.size, TOKENS)

    role.module.forward = whole


def block(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """A block joins the parts of its input. What follows differs between processes, or is the same
    in all of them if heads are not cut."""

    def join(x_BtH: torch.Tensor) -> torch.Tensor:
        if role.on_parts:
            return gather_from_sequence_region(x_BtH, axis, TOKENS)
        return gather_from_tp_region(x_BtH, axis, x_BtH.shape[TOKENS] * axis.size, TOKENS)

    _before(role.module, join)


def block_of_experts(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """A block that sends tokens to experts needs all of them, and gives the same in all processes:
    each takes its part of it."""
    forward: Forward = role.module.forward

    def part(*arguments: object, **named: object) -> object:
        found = forward(*arguments, **named)
        if isinstance(found, tuple):  # with what the router has said
            return scatter_to_tp_region(_checked(found[0], role.module), axis, TOKENS), *found[1:]
        return scatter_to_tp_region(_checked(found, role.module), axis, TOKENS)

    role.module.forward = part
    block(role, axis, _shared)


def dropout(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """Dropout of a part of the tokens, with its part of the mask that the whole would have."""
    module = role.module
    assert isinstance(module, nn.Dropout)

    def forward(x_BtH: torch.Tensor) -> torch.Tensor:
        rows, tokens, *rest = x_BtH.shape
        ones_BTH = x_BtH.new_ones(rows, tokens * axis.size, *rest)
        mask_BTH = F.dropout(ones_BTH, module.p, module.training)
        return x_BtH * mask_BTH.narrow(TOKENS, axis.rank * tokens, tokens)

    module.forward = forward  # type: ignore[method-assign,assignment]


def _before(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let ``module`` see its input changed."""
    forward: Forward = module.forward

    def changed(*arguments: object, **named: object) -> object:
        if _INPUT in named:
            return forward(*arguments, **{**named, _INPUT: change(_checked(named[_INPUT], module))})
        first, *rest = arguments
        return forward(change(_checked(first, module)), *rest, **named)

    module.forward = changed


def _checked(x: object, module: nn.Module) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        raise RecipeError(
            f"parallel.sequence_parallel: {type(module).__name__} passes on more than one sequence "
            "of hidden states; set it to false"
        )
    return x
