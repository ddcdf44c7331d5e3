"""Tensor parallelism: every matrix is sharded over the ranks of one axis, each multiplies by its
shard, and the results are combined.

transformers' own plan of the architecture says how a matrix is sharded. A parameter becomes a
``DTensor`` on that axis, sharded or replicated, so that FSDP, clipping and the optimizer know its
sharding. The forward passes of this module use only its local tensor, which takes half the time of
DTensor's own dispatch and supports sizes that do not divide.

PEFT's adapters follow the matrix that they modify. If it is sharded by columns (its output), B is
sharded in the same way and A is replicated; if it is sharded by rows (its input), A is sharded and
B is replicated.

Sequence parallelism: inside a block (attention, MLP) a rank has all tokens and a shard of each
matrix, as usual. Around it, norms and sums are independent for each token, so each rank computes
them for a shard of the tokens, and saves less for the backward pass. The block gathers the tokens
at its start, and its last matrix leaves each rank its shard of the sum (reduce-scatter), which
costs as much as the sum alone (arXiv:2205.05198). Weights that are applied to a shard of the tokens
have only a part of the gradient; it is summed over the ranks. Shards are equal: a batch whose
length does not divide is padded on the right, where no token attends to the padding.

In a pipeline, stages exchange only the shards: nothing is gathered at the end of a stage. The model
derives masks and positions from the length of its input before the first layer of the stage runs.
So a stage gets a full-length tensor: this rank's tokens in place, zeros elsewhere.

``sharded_model`` calls ``cut_tensors`` when adapters are in place, before FSDP. ``tp_plan`` says
which style a module has; each style below is a function that shards the module's parameters and
replaces its forward pass.

Shapes: B rows, T tokens, H hidden size, I and O the sizes of input and output, K experts of a
token; a small letter is the shard of a size that is on this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from ..batch import IGNORE_INDEX, Batch
from ..errors import RecipeError
from ._collectives import (
    copy_to_tp_region,
    gather_from_sequence_region,
    gather_from_tp_region,
    part,
    reduce_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_tp_region,
)
from .sharding import AxisShard
from .tp_plan import LayerRange, ModulePlan, Style, module_plans
from .world import Axis, local

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel


AXIS = "tp"
TOKENS = 1  # the dimension of tokens
_INPUT = "hidden_states"  # what transformers calls the input of a layer or block
# Full parameter: the shard that has taken its place, and the dimension along which it is sharded.
Shards = dict[nn.Parameter, tuple[nn.Parameter, int | None]]
Forward = Callable[..., object]


def cut_tensors(
    model: PreTrainedModel, axis: Axis, stretches: Sequence[LayerRange] = ()
) -> dict[nn.Parameter, tuple[AxisShard, ...]]:
    """Shard ``model`` over ``axis`` in place; returns the sharding of each of its new parameters.

    Every rank has the same values before. Modules keep their identity, hooks and names, and tied
    parameters stay tied. In ``stretches`` of layers, if given, activations are sharded along the
    sequence. Raises ``RecipeError`` if the architecture cannot be sharded.
    """
    shards: Shards = {}
    for plan in module_plans(model, axis.size, stretches):
        _STYLES[plan.style](plan, axis, shards)
    return {new: () if dim is None else (AxisShard(AXIS, dim),) for new, dim in shards.values()}


def _shard_parameters(
    module: nn.Module, axis: Axis, shards: Shards, *, weight: int | None, bias: int | None
) -> None:
    """Shard the parameters of ``module`` along the given dimensions; a tied one stays tied."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        dim = bias if name == "bias" else weight
        if parameter not in shards:
            shards[parameter] = axis.spread(parameter, dim), dim
        module._parameters[name], existing_dim = shards[parameter]
        if existing_dim != dim:
            raise RecipeError(
                "parallel.tp: two modules of this model share a matrix, but its plan shards "
                "only one of them; leave tp at 1 and use parallel.dp_shard"
            )


# In local tensors: by DTensor's own dispatch a step takes twice the processor time, PEFT's layers
# fail, and norms could not be clipped together with shards (docs/decisions/0023).
@contextlib.contextmanager
def _local_parameters(
    module: nn.Module, use: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Let the module's own code find the local tensors in place of its parameters."""
    parameters = dict(module._parameters)
    for name, parameter in parameters.items():
        module._parameters[name] = None if parameter is None else use(local(parameter))  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(parameters)


def _bias(module: nn.Linear) -> torch.Tensor | None:
    return None if module.bias is None else local(module.bias)


def _by_columns(plan: ModulePlan, axis: Axis, shards: Shards, *, gather: bool = False) -> None:
    """y_BTo = x_BTI W_oI' + b_o, gathered to y_BTO if requested."""
    module = plan.linear()

    def forward(x_BTI: torch.Tensor) -> torch.Tensor:
        x_BTI = x_BTI if plan.on_parts else copy_to_tp_region(x_BTI, axis)
        y_BTo = F.linear(x_BTI, local(module.weight), _bias(module))
        return gather_from_tp_region(y_BTo, axis, module.out_features) if gather else y_BTo

    _shard_parameters(module, axis, shards, weight=0, bias=0)
    plan.module.forward = forward


def _by_rows(plan: ModulePlan, axis: Axis, shards: Shards, *, split: bool = False) -> None:
    """y_BTO = sum of x_BTi W_Oi' over the ranks, + b_O; if requested, x_BTI is split first. Each
    rank gets the full result, or its shard of the tokens."""
    module = plan.linear()

    def forward(x_BTi: torch.Tensor) -> torch.Tensor:
        x_BTi = scatter_to_tp_region(x_BTi, axis) if split else x_BTi
        partial_BTO, bias_O = F.linear(x_BTi, local(module.weight)), _bias(module)
        if plan.on_parts:
            y_BtO = reduce_scatter_to_sequence_region(partial_BTO, axis, TOKENS)
            # each rank adds it to other tokens, so its gradient is the sum over the ranks
            return y_BtO if bias_O is None else y_BtO + copy_to_tp_region(bias_O, axis)
        y_BTO = reduce_from_tp_region(partial_BTO, axis)
        return y_BTO if bias_O is None else y_BTO + bias_O

    _shard_parameters(module, axis, shards, weight=1, bias=None)
    plan.module.forward = forward


def _some_rows(plan: ModulePlan, axis: Axis, shards: Shards) -> None:
    """Fewer key-value heads than ranks: the matrix is replicated, each rank uses the one head to
    which its queries attend, and gradients are summed."""
    module, head_size = plan.linear(), plan.head
    num_heads = module.out_features // head_size
    first_row = axis.rank * num_heads // axis.size * head_size
    rows = slice(first_row, first_row + head_size)

    def forward(x_BTI: torch.Tensor) -> torch.Tensor:
        bias_O = _bias(module)
        bias_o = None if bias_O is None else copy_to_tp_region(bias_O, axis)[rows]
        x_BTI = x_BTI if plan.on_parts else copy_to_tp_region(x_BTI, axis)
        return F.linear(x_BTI, copy_to_tp_region(local(module.weight), axis)[rows], bias_o)

    _shard_parameters(module, axis, shards, weight=None, bias=None)
    plan.module.forward = forward


def _groups(plan: ModulePlan, _axis: Axis, _shards: Shards) -> None:
    """How many query heads attend to each key-value head on this rank."""
    plan.module.num_key_value_groups = plan.length  # type: ignore[assignment]


def _by_vocabulary(plan: ModulePlan, axis: Axis, shards: Shards) -> None:
    """Each rank looks up the tokens whose rows it has; the sum over the ranks is complete."""
    module, look_up = plan.embedding(), plan.embedding().forward
    local_rows = part(module.num_embeddings, axis)
    num_rows = local_rows.stop - local_rows.start

    def forward(ids_BT: torch.Tensor) -> torch.Tensor:
        is_local_BT = (ids_BT >= local_rows.start) & (ids_BT < local_rows.stop)
        # a rank without a row looks up a row of zeros
        with _local_parameters(module, lambda w: w if num_rows else F.pad(w, (0, 0, 0, 1))):
            embedded_BTH = look_up((ids_BT - local_rows.start).clamp(0, max(num_rows - 1, 0)))
        return reduce_from_tp_region(embedded_BTH * is_local_BT[..., None], axis)

    if module.padding_idx is not None:  # its row is never trained
        is_local = local_rows.start <= module.padding_idx < local_rows.stop
        module.padding_idx = module.padding_idx - local_rows.start if is_local else None
    _shard_parameters(module, axis, shards, weight=0, bias=None)
    plan.module.forward = forward


def _replicated(plan: ModulePlan, axis: Axis, shards: Shards, *, inside: bool = False) -> None:
    """The module's own forward pass on replicated parameters. If it sees only a shard of the heads
    (``inside``), or of the tokens, its gradients are summed."""
    module, module_forward = plan.module, plan.module.forward
    is_summed = inside or plan.on_parts

    def forward(*arguments: object, **keywords: object) -> torch.Tensor:
        with _local_parameters(module, lambda w: copy_to_tp_region(w, axis) if is_summed else w):
            output: torch.Tensor = module_forward(*arguments, **keywords)
            return output

    _shard_parameters(module, axis, shards, weight=None, bias=None)
    plan.module.forward = forward


# Experts go unsharded to one rank. transformers' plan would shard the matrices of each; gates and
# ups are one tensor there, and a rank's shard of that would be two boxes (docs/decisions/0029).
def _experts(plan: ModulePlan, axis: Axis, shards: Shards) -> None:
    """Each rank has some of the experts, unsharded, and runs all tokens that are routed to them;
    the sum over the ranks is the full result. For the model's own code, experts of other ranks
    are the one after the last, which does nothing."""
    module, run_experts = plan.module, plan.module.forward
    local_experts = part(plan.length, axis)
    num_experts = local_experts.stop - local_experts.start

    def forward(x_TH: torch.Tensor, experts_TK: torch.Tensor, scales_TK: torch.Tensor) -> object:
        is_local_TK = (experts_TK >= local_experts.start) & (experts_TK < local_experts.stop)
        local_TK = (experts_TK - local_experts.start).where(is_local_TK, num_experts)
        scales_TK = copy_to_tp_region(scales_TK, axis) * is_local_TK
        with _local_parameters(module, lambda values: values):
            partial_TH: torch.Tensor = run_experts(
                copy_to_tp_region(x_TH, axis), local_TK, scales_TK
            )
        return reduce_from_tp_region(partial_TH, axis)

    _shard_parameters(module, axis, shards, weight=0, bias=0)
    module.num_experts = num_experts
    module._is_expert_parallel = True  # type: ignore[assignment]
    module.forward = forward


def _dropout(plan: ModulePlan, axis: Axis, _shards: Shards, *, dim: int) -> None:
    """Dropout of an input that is sharded along ``dim``, with its shard of the mask of the full
    input: all ranks draw equally many numbers, so their generators stay in step."""
    module = plan.module
    assert isinstance(module, nn.Dropout)

    def forward(x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] = shape[dim] * axis.size if dim == TOKENS else plan.length
        mask = F.dropout(x.new_ones(shape), module.p, module.training)
        shard = part(shape[dim], axis)
        return x * mask.narrow(dim, shard.start, shard.stop - shard.start)

    plan.module.forward = forward


# Sequence parallelism


def widened(batch: Batch, multiple: int) -> Batch:
    """``batch`` with a length that ``multiple`` divides: it is extended by padding, or in a packed
    row by a document of its own, and this is masked."""
    # On the right, where causal models do not look back from. With uneven shards, every gather
    # would have to know the length of its batch, which with recomputation in a pipeline need not be
    # the last one seen (docs/decisions/0029).
    length = batch.input_ids.shape[1]
    num_padding = -length % multiple
    if not num_padding:
        return batch
    mask, bounds, branches = batch.attention_mask, batch.cu_seqlens, batch.branches
    if branches is not None:  # the padding is a document that is all prompt, without responses
        max_responses = branches.shape[1] - 1
        padding = F.pad(branches.new_tensor([[num_padding]]), (0, max_responses))
        branches = torch.cat([branches, padding])
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, num_padding)),
        labels=F.pad(batch.labels, (0, num_padding), value=IGNORE_INDEX),
        position_ids=F.pad(batch.position_ids, (0, num_padding)),
        attention_mask=None if mask is None else F.pad(mask, (0, num_padding)),
        cu_seqlens=None if bounds is None else F.pad(bounds, (0, 1), value=length + num_padding),
        branches=branches,
    )


def _first_layer(plan: ModulePlan, axis: Axis, _shards: Shards) -> None:
    """The first layer takes its shard of the tokens."""

    def scatter(x_BTH: torch.Tensor) -> torch.Tensor:
        if x_BTH.shape[TOKENS] % axis.size:  # the others would wait for shards of another size
            raise ValueError(
                f"{x_BTH.shape[TOKENS]} tokens do not divide into {axis.size} equal shards"
            )
        return scatter_to_tp_region(x_BTH, axis, TOKENS)

    _change_input(plan.module, scatter)


def placed(x_BtH: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[B, T, H]: a shard of the tokens in its place among all of them, the others zero."""
    num_tokens = x_BtH.shape[TOKENS]
    start = axis.rank * num_tokens
    return F.pad(x_BtH, (0, 0, start, (axis.size - 1) * num_tokens - start))


def _entered_layer(plan: ModulePlan, axis: Axis, _shards: Shards) -> None:
    """The first layer of a later pipeline stage takes its tokens out of the ``placed`` tensor."""

    def take(x_BTH: torch.Tensor) -> torch.Tensor:
        num_tokens = x_BTH.shape[TOKENS] // axis.size
        return x_BTH.narrow(TOKENS, axis.rank * num_tokens, num_tokens)

    _change_input(plan.module, take)


def _last_layer(plan: ModulePlan, axis: Axis, _shards: Shards) -> None:
    """After the last layer, all ranks have all tokens."""
    layer_forward: Forward = plan.module.forward

    def forward(*arguments: object, **keywords: object) -> object:
        x_BtH = _hidden_states(layer_forward(*arguments, **keywords), plan.module)
        return gather_from_tp_region(x_BtH, axis, x_BtH.shape[TOKENS] * axis.size, TOKENS)

    plan.module.forward = forward


def block(plan: ModulePlan, axis: Axis, _shards: Shards) -> None:
    """A block gathers the tokens of its input. Later computation differs between ranks, or is the
    same on all of them if heads are not sharded."""

    def gather(x_BtH: torch.Tensor) -> torch.Tensor:
        if plan.on_parts:
            return gather_from_sequence_region(x_BtH, axis, TOKENS)
        return gather_from_tp_region(x_BtH, axis, x_BtH.shape[TOKENS] * axis.size, TOKENS)

    _change_input(plan.module, gather)


def _block_of_experts(plan: ModulePlan, axis: Axis, shards: Shards) -> None:
    """A block that routes tokens to experts needs all of them, and gives the same on all ranks:
    each takes its shard of the result."""
    block_forward: Forward = plan.module.forward

    def forward(*arguments: object, **keywords: object) -> object:
        output = block_forward(*arguments, **keywords)
        x_BTH, *router_outputs = output if isinstance(output, tuple) else (output,)
        x_BtH = scatter_to_tp_region(_hidden_states(x_BTH, plan.module), axis, TOKENS)
        return (x_BtH, *router_outputs) if isinstance(output, tuple) else x_BtH

    plan.module.forward = forward
    block(plan, axis, shards)


def _change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make ``module`` get changed hidden states, by position or by name."""
    module_forward: Forward = module.forward

    def forward(*arguments: object, **keywords: object) -> object:
        if _INPUT in keywords:
            changed = change(_hidden_states(keywords[_INPUT], module))
            return module_forward(*arguments, **{**keywords, _INPUT: changed})
        hidden, *others = arguments
        return module_forward(change(_hidden_states(hidden, module)), *others, **keywords)

    module.forward = forward


def _hidden_states(x: object, module: nn.Module) -> torch.Tensor:
    """``x``, which is [B, T, H]. Raises ``RecipeError`` if it is anything else."""
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        raise RecipeError(
            f"parallel.sequence_parallel: {type(module).__name__} returns more than one "
            "sequence of hidden states; set it to false"
        )
    return x


_STYLES: dict[Style, Callable[[ModulePlan, Axis, Shards], None]] = {
    "columns": _by_columns,
    "columns_gathered": partial(_by_columns, gather=True),
    "rows": _by_rows,
    "rows_of_whole": partial(_by_rows, split=True),
    "some_rows": _some_rows,
    "groups": _groups,
    "vocabulary": _by_vocabulary,
    "whole": _replicated,
    "whole_inside": partial(_replicated, inside=True),
    "experts": _experts,
    "dropout": partial(_dropout, dim=-1),
    "first_layer": _first_layer,
    "entered_layer": _entered_layer,
    "last_layer": _last_layer,
    "block": block,
    "block_of_experts": _block_of_experts,
    "dropout_of_parts": partial(_dropout, dim=TOKENS),
}
