"""Tensor parallelism: every matrix is sharded over the ranks of one axis, each multiplies by its
shard, and the results are combined.

transformers' own plan of the architecture says how a matrix is sharded. A parameter becomes a
``DTensor`` on that axis, sharded or replicated, so that FSDP, clipping and the optimizer know its
sharding. The forward passes of this module use only its local tensor, which takes half the time of
DTensor's own dispatch and supports sizes that do not divide.

PEFT's adapters follow the matrix that they modify. If it is sharded by columns (its output), B is
sharded in the same way and A is replicated; if it is sharded by rows (its input), A is sharded and
B is replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import RecipeError
from ..collectives import (
    Axis,
    copy_to_tp_region,
    gather_from_tp_region,
    part,
    reduce_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_tp_region,
)
from ..sharding import AxisShard
from .sequence_parallel import (
    TOKENS,
    block,
    block_of_experts,
    dropout,
    entered_layer,
    first_layer,
    last_layer,
)
from .tp_plan import LayerRange, ModulePlan, Style, module_plans

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel

AXIS = "tp"
# Whole parameter: what has taken its place, and along which dimension that is cut.
Shared = dict[nn.Parameter, tuple[nn.Parameter, int | None]]


def cut_tensors(
    model: PreTrainedModel, axis: Axis, stretches: Sequence[LayerRange] = ()
) -> dict[nn.Parameter, tuple[AxisShard, ...]]:
    """Shard ``model`` over ``axis`` in place; returns the sharding of each of its new parameters.

    Every rank has the same values before. Modules keep their identity, hooks and names, and tied
    parameters stay tied. In ``stretches`` of layers, if given, activations are sharded along the
    sequence. Raises ``RecipeError`` if the architecture cannot be sharded.
    """
    shared: Shared = {}
    for role in module_plans(model, axis.size, stretches):
        _STYLES[role.style](role, axis, shared)
    return {new: () if dim is None else (AxisShard(AXIS, dim),) for new, dim in shared.values()}


def _cut(
    module: nn.Module, axis: Axis, shared: Shared, *, weight: int | None, bias: int | None
) -> None:
    """Shard the parameters of ``module`` along the given dimensions; a shared one stays shared."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        dim = bias if name == "bias" else weight
        if parameter not in shared:
            shared[parameter] = axis.spread(parameter, dim), dim
        module._parameters[name], cut = shared[parameter]
        if cut != dim:
            raise RecipeError(
                "parallel.tp: two modules of this model share a matrix, but its plan shards "
                "only one of them; leave tp at 1 and use parallel.dp_shard"
            )


def _here(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _weight(module: nn.Module) -> torch.Tensor:
    weight = _here(module.weight)  # type: ignore[arg-type]
    assert weight is not None
    return weight


def _bias(module: nn.Module) -> torch.Tensor | None:
    return _here(module.bias)  # type: ignore[arg-type]


def _set_forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    module.forward = forward


# Each style: how the parameters lie, and the forward pass on what is here of them. B rows, T
# tokens, I and O the sizes of input and output; a small letter is the part of a size that is here.


def _by_columns(role: ModulePlan, axis: Axis, shared: Shared, *, gather: bool = False) -> None:
    """y_BTo = x_BTI W_oI' + b_o, gathered to y_BTO if requested."""
    module = role.linear()

    def forward(x_BTI: torch.Tensor) -> torch.Tensor:
        x_BTI = x_BTI if role.on_parts else copy_to_tp_region(x_BTI, axis)
        y_BTo = F.linear(x_BTI, _weight(module), _bias(module))
        return gather_from_tp_region(y_BTo, axis, module.out_features) if gather else y_BTo

    _cut(module, axis, shared, weight=0, bias=0)
    _set_forward(module, forward)


def _by_rows(role: ModulePlan, axis: Axis, shared: Shared, *, split: bool = False) -> None:
    """y_BTO = sum of x_BTi W_Oi' over the ranks, + b_O; if requested, x_BTI is split first. Each
    rank gets the full result, or its shard of the tokens."""
    module = role.linear()

    def forward(x_BTi: torch.Tensor) -> torch.Tensor:
        x_BTi = scatter_to_tp_region(x_BTi, axis) if split else x_BTi
        y_BTO, bias_O = F.linear(x_BTi, _weight(module)), _bias(module)
        y_BTO = (
            reduce_scatter_to_sequence_region(y_BTO, axis, TOKENS)
            if role.on_parts
            else reduce_from_tp_region(y_BTO, axis)
        )
        if bias_O is None:
            return y_BTO
        return y_BTO + (copy_to_tp_region(bias_O, axis) if role.on_parts else bias_O)

    _cut(module, axis, shared, weight=1, bias=None)
    _set_forward(module, forward)


def _some_rows(role: ModulePlan, axis: Axis, shared: Shared) -> None:
    """Fewer key-value heads than ranks: the matrix is replicated, each rank uses the one head to
    which its queries attend, and gradients are summed."""
    module, head = role.linear(), role.head
    first = axis.rank * (module.out_features // head) // axis.size * head
    rows = slice(first, first + head)

    def forward(x_BTI: torch.Tensor) -> torch.Tensor:
        bias_O = _bias(module)
        bias_o = None if bias_O is None else copy_to_tp_region(bias_O, axis)[rows]
        x_BTI = x_BTI if role.on_parts else copy_to_tp_region(x_BTI, axis)
        return F.linear(x_BTI, copy_to_tp_region(_weight(module), axis)[rows], bias_o)

    _cut(module, axis, shared, weight=None, bias=None)
    _set_forward(module, forward)


def _by_vocabulary(role: ModulePlan, axis: Axis, shared: Shared) -> None:
    """Each rank looks up the tokens whose rows it has; the sum over the ranks is complete."""
    module, whole = role.embedding(), role.embedding().forward
    mine = part(module.num_embeddings, axis)
    count = mine.stop - mine.start

    def forward(ids_BT: torch.Tensor) -> torch.Tensor:
        is_here_BT = (ids_BT >= mine.start) & (ids_BT < mine.stop)
        with _local_parameters(module, lambda rows: rows if count else F.pad(rows, (0, 0, 0, 1))):
            found_BTI = whole((ids_BT - mine.start).clamp(0, max(count - 1, 0)))
        return reduce_from_tp_region(found_BTI * is_here_BT[..., None], axis)

    if module.padding_idx is not None:  # its row never learns
        is_here = mine.start <= module.padding_idx < mine.stop
        module.padding_idx = module.padding_idx - mine.start if is_here else None
    _cut(module, axis, shared, weight=0, bias=None)
    _set_forward(module, forward)


def _whole(role: ModulePlan, axis: Axis, shared: Shared, *, inside: bool = False) -> None:
    """The module's own forward pass on replicated parameters. If it sees only a shard of the heads
    (``inside``), or of the tokens, its gradients are summed."""
    module, whole = role.module, role.module.forward
    inside = inside or role.on_parts

    def forward(*arguments: object, **named: object) -> torch.Tensor:
        with _local_parameters(module, lambda p: copy_to_tp_region(p, axis) if inside else p):
            found: torch.Tensor = whole(*arguments, **named)
            return found

    _cut(module, axis, shared, weight=None, bias=None)
    _set_forward(module, forward)


def _experts(role: ModulePlan, axis: Axis, shared: Shared) -> None:
    """Each rank has some of the experts, unsharded, and runs all tokens that are routed to them;
    the sum over the ranks is the full result. For the model's own code, experts of other ranks
    are the one after the last, which does nothing."""
    module, whole = role.module, role.module.forward
    mine = part(role.length, axis)
    count = mine.stop - mine.start

    def forward(x_TI: torch.Tensor, chosen_TK: torch.Tensor, scales_TK: torch.Tensor) -> object:
        is_here_TK = (chosen_TK >= mine.start) & (chosen_TK < mine.stop)
        here_TK = (chosen_TK - mine.start).where(is_here_TK, count)
        scales_TK = copy_to_tp_region(scales_TK, axis) * is_here_TK
        with _local_parameters(module, lambda values: values):
            found: torch.Tensor = whole(copy_to_tp_region(x_TI, axis), here_TK, scales_TK)
        return reduce_from_tp_region(found, axis)

    _cut(module, axis, shared, weight=0, bias=0)
    module.num_experts = count
    module._is_expert_parallel = True  # type: ignore[assignment]
    module.forward = forward


def _groups(role: ModulePlan, _axis: Axis, _shared: Shared) -> None:
    """How many query heads attend to each key-value head on this rank."""
    role.module.num_key_value_groups = role.length  # type: ignore[assignment]


@contextlib.contextmanager
def _local_parameters(
    module: nn.Module, use: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Let the module's own code find the local tensors in place of its parameters."""
    spread = dict(module._parameters)
    for name, parameter in spread.items():
        local = _here(parameter)
        module._parameters[name] = None if local is None else use(local)  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(spread)


def _part_of_dropout(role: ModulePlan, axis: Axis, _shared: Shared) -> None:
    """Dropout of a sharded input, with its part of the mask of the full input: all ranks draw
    equally many numbers, so their generators stay in step."""
    module = role.module
    assert isinstance(module, nn.Dropout)
    mine = part(role.length, axis)

    def forward(x_BTi: torch.Tensor) -> torch.Tensor:
        ones_BTI = x_BTi.new_ones(*x_BTi.shape[:-1], role.length)
        return x_BTi * F.dropout(ones_BTI, module.p, module.training)[..., mine]

    _set_forward(module, forward)


_STYLES: dict[Style, Callable[[ModulePlan, Axis, Shared], None]] = {
    "columns": _by_columns,
    "columns_gathered": partial(_by_columns, gather=True),
    "rows": _by_rows,
    "rows_of_whole": partial(_by_rows, split=True),
    "some_rows": _some_rows,
    "groups": _groups,
    "vocabulary": _by_vocabulary,
    "whole": _whole,
    "whole_inside": partial(_whole, inside=True),
    "experts": _experts,
    "dropout": _part_of_dropout,
    "block": block,
    "block_of_experts": block_of_experts,
    "first_layer": first_layer,
    "entered_layer": entered_layer,
    "last_layer": last_layer,
    "dropout_of_parts": dropout,
}
