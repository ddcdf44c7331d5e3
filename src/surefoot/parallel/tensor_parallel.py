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
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

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
from .tp_plan import LayerRange, ModulePlan, Style, cuts_vocabulary, module_plans
from .world import Axis, MeshAxis, World, local

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel


AXIS = "tp"
# Whole parameter: what has taken its place, and along which dimension that is cut.
Shared = dict[nn.Parameter, tuple[nn.Parameter, int | None]]
TOKENS = 1  # the dimension of tokens
_INPUT = "hidden_states"  # what transformers calls the input of a layer or block
Forward = Callable[..., object]


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


def _weight(module: nn.Linear) -> torch.Tensor:
    return local(module.weight)


def _bias(module: nn.Linear) -> torch.Tensor | None:
    return None if module.bias is None else local(module.bias)


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
    role.module.forward = forward


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
    role.module.forward = forward


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
    role.module.forward = forward


def _by_vocabulary(role: ModulePlan, axis: Axis, shared: Shared) -> None:
    """Each rank looks up the tokens whose rows it has; the sum over the ranks is complete."""
    module, look_up = role.embedding(), role.embedding().forward
    local_rows = part(module.num_embeddings, axis)
    count = local_rows.stop - local_rows.start

    def forward(ids_BT: torch.Tensor) -> torch.Tensor:
        is_here_BT = (ids_BT >= local_rows.start) & (ids_BT < local_rows.stop)
        with _local_parameters(module, lambda rows: rows if count else F.pad(rows, (0, 0, 0, 1))):
            embedded_BTI = look_up((ids_BT - local_rows.start).clamp(0, max(count - 1, 0)))
        return reduce_from_tp_region(embedded_BTI * is_here_BT[..., None], axis)

    if module.padding_idx is not None:  # its row never learns
        is_here = local_rows.start <= module.padding_idx < local_rows.stop
        module.padding_idx = module.padding_idx - local_rows.start if is_here else None
    _cut(module, axis, shared, weight=0, bias=None)
    role.module.forward = forward


def _whole(role: ModulePlan, axis: Axis, shared: Shared, *, inside: bool = False) -> None:
    """The module's own forward pass on replicated parameters. If it sees only a shard of the heads
    (``inside``), or of the tokens, its gradients are summed."""
    module, own_forward = role.module, role.module.forward
    inside = inside or role.on_parts

    def forward(*arguments: object, **keywords: object) -> torch.Tensor:
        with _local_parameters(module, lambda p: copy_to_tp_region(p, axis) if inside else p):
            output: torch.Tensor = own_forward(*arguments, **keywords)
            return output

    _cut(module, axis, shared, weight=None, bias=None)
    role.module.forward = forward


# Experts go whole to one rank. transformers' plan would cut the matrices of each; gates and ups
# are one tensor there, and a rank's shard of that would be two boxes (docs/decisions/0029).
def _experts(role: ModulePlan, axis: Axis, shared: Shared) -> None:
    """Each rank has some of the experts, unsharded, and runs all tokens that are routed to them;
    the sum over the ranks is the full result. For the model's own code, experts of other ranks
    are the one after the last, which does nothing."""
    module, run_experts = role.module, role.module.forward
    local_experts = part(role.length, axis)
    count = local_experts.stop - local_experts.start

    def forward(x_TI: torch.Tensor, chosen_TK: torch.Tensor, scales_TK: torch.Tensor) -> object:
        is_here_TK = (chosen_TK >= local_experts.start) & (chosen_TK < local_experts.stop)
        here_TK = (chosen_TK - local_experts.start).where(is_here_TK, count)
        scales_TK = copy_to_tp_region(scales_TK, axis) * is_here_TK
        with _local_parameters(module, lambda values: values):
            partial_sum: torch.Tensor = run_experts(
                copy_to_tp_region(x_TI, axis), here_TK, scales_TK
            )
        return reduce_from_tp_region(partial_sum, axis)

    _cut(module, axis, shared, weight=0, bias=0)
    module.num_experts = count
    module._is_expert_parallel = True  # type: ignore[assignment]
    module.forward = forward


def _groups(role: ModulePlan, _axis: Axis, _shared: Shared) -> None:
    """How many query heads attend to each key-value head on this rank."""
    role.module.num_key_value_groups = role.length  # type: ignore[assignment]


@contextlib.contextmanager
# On local tensors: by DTensor's own dispatch a step takes twice the processor time, PEFT's layers
# fail, and norms could not be clipped together with shards (docs/decisions/0023).
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


def _part_of_dropout(role: ModulePlan, axis: Axis, _shared: Shared) -> None:
    """Dropout of a sharded input, with its part of the mask of the full input: all ranks draw
    equally many numbers, so their generators stay in step."""
    module = role.module
    assert isinstance(module, nn.Dropout)
    local_slice = part(role.length, axis)

    def forward(x_BTi: torch.Tensor) -> torch.Tensor:
        ones_BTI = x_BTi.new_ones(*x_BTi.shape[:-1], role.length)
        return x_BTi * F.dropout(ones_BTI, module.p, module.training)[..., local_slice]

    role.module.forward = forward


# Sequence parallelism: between the blocks of sharded matrices, each rank has only a shard of the
# tokens. Around a block (attention, MLP), norms and sums are independent for each token, so the
# ranks need not all compute them, and save them for the backward pass.


def widened(batch: Batch, multiple: int) -> Batch:
    """``batch`` with a length that ``multiple`` divides: it is extended by padding, or in a packed
    row by a document of its own, and this is masked."""
    # On the right, where causal models do not look back from. With uneven shards, every join would
    # have to know the length of its batch, which with recomputation in a pipeline need not be the
    # last one seen (docs/decisions/0029).
    length = batch.input_ids.shape[1]
    num_padding = -length % multiple
    if not num_padding:
        return batch
    mask, bounds, branches = batch.attention_mask, batch.cu_seqlens, batch.branches
    most = 0 if branches is None else branches.shape[1] - 1  # responses of a document
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, num_padding)),
        labels=F.pad(batch.labels, (0, num_padding), value=IGNORE_INDEX),
        position_ids=F.pad(batch.position_ids, (0, num_padding)),
        attention_mask=None if mask is None else F.pad(mask, (0, num_padding)),
        cu_seqlens=None if bounds is None else F.pad(bounds, (0, 1), value=length + num_padding),
        branches=None
        if branches is None
        else torch.cat([branches, F.pad(branches.new_tensor([[num_padding]]), (0, most))]),
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

    def whole(*arguments: object, **keywords: object) -> object:
        x_BtH = _checked(forward(*arguments, **keywords), role.module)
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

    def part(*arguments: object, **keywords: object) -> object:
        outputs = forward(*arguments, **keywords)
        hidden, *of_router = outputs if isinstance(outputs, tuple) else (outputs,)
        part_BtH = scatter_to_tp_region(_checked(hidden, role.module), axis, TOKENS)
        return (part_BtH, *of_router) if isinstance(outputs, tuple) else part_BtH

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

    def changed(*arguments: object, **keywords: object) -> object:
        if _INPUT in keywords:
            changed_input = change(_checked(keywords[_INPUT], module))
            return forward(*arguments, **{**keywords, _INPUT: changed_input})
        first, *rest = arguments
        return forward(change(_checked(first, module)), *rest, **keywords)

    module.forward = changed


def _checked(x: object, module: nn.Module) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        raise RecipeError(
            f"parallel.sequence_parallel: {type(module).__name__} returns more than one "
            "sequence of hidden states; set it to false"
        )
    return x


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


@dataclass(frozen=True)
class VocabParallelLogits:
    """What ``outputs`` needs of logits, computed by all ranks of ``axis`` together.

    No training rank ever has the full logits. For every trained position, the ranks exchange three
    numbers instead: the largest logit, the sum of the exponentials, and the label's own logit.

    Shapes: N trained positions, v the words of the vocabulary on this rank.
    """

    axis: Axis
    size: int  # of the whole vocabulary

    def logps(self, logits_Nv: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of each label."""
        logps_N = _VocabParallelLogps.apply(  # type: ignore[no-untyped-call]
            self._some(logits_Nv), labels_N - self._first, self.axis
        )
        return cast(torch.Tensor, logps_N)

    def means(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of a word, averaged over the full vocabulary: E[logit] - log Z."""
        most_N = self.axis.largest(self._some(logits_Nv.detach()).amax(-1))
        logits_Nv = logits_Nv - most_N[:, None]
        sums_2N = torch.stack([logits_Nv.exp().sum(-1), logits_Nv.sum(-1)])
        total_N, logit_N = reduce_from_tp_region(sums_2N, self.axis)
        means_N: torch.Tensor = logit_N / self.size - total_N.log()
        return means_N

    def entropies(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] entropy of each distribution in nats: log Z - E[logit]."""
        logits_Nv = self._some(logits_Nv)
        most_N = self.axis.largest(logits_Nv.detach().amax(-1))
        logits_Nv = logits_Nv - most_N[:, None]
        weights_Nv = logits_Nv.exp()
        sums_2N = torch.stack([weights_Nv.sum(-1), (weights_Nv * logits_Nv).sum(-1)])
        total_N, product_N = reduce_from_tp_region(sums_2N, self.axis)
        entropies_N: torch.Tensor = total_N.log() - product_N / total_N
        return entropies_N

    def predictions(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] the most probable word; of equal ones the first."""
        best_N, index_N = self._some(logits_Nv.detach()).max(-1)
        is_best_N = best_N == self.axis.largest(best_N)
        return -self.axis.largest(-torch.where(is_best_N, index_N + self._first, self.size))

    @property
    def width(self) -> int:
        """Words on this rank."""
        local_words = part(self.size, self.axis)
        return int(local_words.stop - local_words.start)

    @property
    def _first(self) -> int:
        first: int = part(self.size, self.axis).start
        return first

    def _some(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """At least one word, an impossible one if none is on this rank."""
        assert logits_Nv.shape[-1] == self.width
        if self.width:
            return logits_Nv
        return F.pad(logits_Nv, (0, 1), value=torch.finfo(logits_Nv.dtype).min)


def cut_vocabulary(model: PreTrainedModel, world: World) -> VocabParallelLogits | None:
    """The vocabulary of ``model`` as it is sharded over ``world``; None if it is not."""
    if world.mesh is None or world.tp == 1 or not cuts_vocabulary(model):
        return None
    return VocabParallelLogits(
        MeshAxis(world.mesh["tp"]), model.config.get_text_config().vocab_size
    )


class _VocabParallelLogps(torch.autograd.Function):
    """Saves the probabilities for the backward pass, and nothing else of that size."""

    @staticmethod
    def forward(
        ctx: Any, logits_Nv: torch.Tensor, labels_N: torch.Tensor, axis: Axis
    ) -> torch.Tensor:
        most_N = axis.largest(logits_Nv.amax(-1))
        probs_Nv = logits_Nv - most_N[:, None]
        is_here_N = (labels_N >= 0) & (labels_N < logits_Nv.shape[-1])
        labels_N = labels_N.where(is_here_N, 0)
        label_N = probs_Nv.gather(-1, labels_N[:, None])[:, 0] * is_here_N
        total_N, label_N = axis.sum(torch.stack([probs_Nv.exp_().sum(-1), label_N]))
        ctx.save_for_backward(probs_Nv.div_(total_N[:, None]), labels_N, is_here_N)
        logps_N: torch.Tensor = label_N - total_N.log()
        return logps_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_N,) = gradients
        probs_Nv, labels_N, is_here_N = ctx.saved_tensors
        found_Nv = probs_Nv * -gradient_N[:, None]
        found_Nv.scatter_add_(-1, labels_N[:, None], (gradient_N * is_here_N)[:, None])
        return found_Nv, None, None
