"""Sequence parallelism: between the blocks of sharded matrices, each ``tp`` rank has only a shard
of the tokens.

Inside a block (attention, MLP) a rank has all tokens and a shard of each matrix, as usual. Around
it, norms and sums are independent for each token, so the ranks need not all compute them, and save
them for the backward pass. The block gathers the tokens at its start, and its last matrix leaves
each rank its shard of the sum (reduce-scatter), which costs as much as the sum alone
(arXiv:2205.05198). Weights that are applied to a shard of the tokens have only a part of the
gradient; it is summed over the ranks.

In a pipeline, stages exchange only the shards: nothing is gathered at the end of a stage. The model
derives masks and positions from the length of its input before the first layer of the stage runs.
So a stage gets a full-length tensor: this rank's tokens in place, zeros elsewhere.

Shards are equal: a batch whose length does not divide is padded on the right, where no token
attends to the padding.
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
    """``batch`` with a length that ``multiple`` divides: it is extended by padding, or in a packed
    row by a document of its own, and this is masked."""
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
    """The first layer takes its shard of the tokens."""

    def take(x_BTH: torch.Tensor) -> torch.Tensor:
        if x_BTH.shape[TOKENS] % axis.size:  # the others would wait for parts of another size
            raise ValueError(
                f"{x_BTH.shape[TOKENS]} tokens do not divide into {axis.size} equal shards"
            )
        return scatter_to_tp_region(x_BTH, axis, TOKENS)

    _before(role.module, take)


def placed(x_BtH: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[B, T, H]: a shard of the tokens in its place among all of them, the others zero."""
    tokens = x_BtH.shape[TOKENS]
    before = axis.rank * tokens
    return F.pad(x_BtH, (0, 0, before, (axis.size - 1) * tokens - before))


def entered_layer(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """The first layer of a later stage takes its shard of the tokens from the ``placed`` tensor."""

    def take(x_BTH: torch.Tensor) -> torch.Tensor:
        tokens = x_BTH.shape[TOKENS] // axis.size
        return x_BTH.narrow(TOKENS, axis.rank * tokens, tokens)

    _before(role.module, take)


def last_layer(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """After the last layer, all ranks have all tokens."""
    forward: Forward = role.module.forward

    def whole(*arguments: object, **named: object) -> object:
        x_BtH = _checked(forward(*arguments, **named), role.module)
        return gather_from_tp_region(x_BtH, axis, x_BtH.shape[TOKENS] * axis.size, TOKENS)

    role.module.forward = whole


def block(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """A block gathers the tokens of its input. Later computation differs between ranks, or is the
    same on all of them if heads are not sharded."""

    def join(x_BtH: torch.Tensor) -> torch.Tensor:
        if role.on_parts:
            return gather_from_sequence_region(x_BtH, axis, TOKENS)
        return gather_from_tp_region(x_BtH, axis, x_BtH.shape[TOKENS] * axis.size, TOKENS)

    _before(role.module, join)


def block_of_experts(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """A block that routes tokens to experts needs all of them, and gives the same on all ranks:
    each takes its shard of the result."""
    forward: Forward = role.module.forward

    def part(*arguments: object, **named: object) -> object:
        found = forward(*arguments, **named)
        if isinstance(found, tuple):  # with what the router has said
            return scatter_to_tp_region(_checked(found[0], role.module), axis, TOKENS), *found[1:]
        return scatter_to_tp_region(_checked(found, role.module), axis, TOKENS)

    role.module.forward = part
    block(role, axis, _shared)


def dropout(role: ModulePlan, axis: Axis, _shared: object) -> None:
    """Dropout of a shard of the tokens, with its part of the mask of all tokens."""
    module = role.module
    assert isinstance(module, nn.Dropout)

    def forward(x_BtH: torch.Tensor) -> torch.Tensor:
        rows, tokens, *rest = x_BtH.shape
        ones_BTH = x_BtH.new_ones(rows, tokens * axis.size, *rest)
        mask_BTH = F.dropout(ones_BTH, module.p, module.training)
        return x_BtH * mask_BTH.narrow(TOKENS, axis.rank * tokens, tokens)

    module.forward = forward  # type: ignore[method-assign,assignment]


def _before(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make ``module`` get a changed input."""
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
            f"parallel.sequence_parallel: {type(module).__name__} returns more than one "
            "sequence of hidden states; set it to false"
        )
    return x
