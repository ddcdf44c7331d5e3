"""Scales that move from the outputs of a norm or linear layer into the layers that read them.

Dividing the outputs of one by ``s`` and multiplying the columns of the others by ``s`` changes
nothing, if nobody else reads these outputs and nothing between is nonlinear. Which layers have this
property is not known by their names: it is tried on a row, with scales that are powers of two, of
which floating point rounds nothing.

Legend of shapes: E experts (1 without), O outputs, I inputs, n scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import nn

from ...model.pretrained.weights import place
from .inputs import LinearCalls, Place
from .layerwise import Call, run

_NEAREST = 4  # linear layers that are tried: queries, keys, values and a gate
_EXACT = 1e-4  # of what the layer adds to the hidden states; where it is not exact, it is about 1


@dataclass(frozen=True, eq=False)
class Folding:
    """Where scales go. All tensors are those of a loaded layer."""

    producer: nn.Parameter  # [O, I], [E, O, I] or, of a norm, [n]
    bias: nn.Parameter | None
    consumers: tuple[nn.Parameter, ...]  # [O, I] or [E, O, I]
    rows: slice = field(default_factory=lambda: slice(None))  # of the producer
    has_one: bool = False  # the norm multiplies with 1 + weight
    heads: tuple[int, int] = (1, 1)  # size of a head, and how many heads of queries share one

    @property
    def is_norm(self) -> bool:
        """Whether the producer is a norm."""
        return self.producer.ndim == 1

    @property
    def touched(self) -> list[nn.Parameter]:
        """All that it changes."""
        bias = [] if self.bias is None else [self.bias]
        return [self.producer, *bias, *self.consumers]

    @property
    def num_scales(self) -> int:
        """Of each expert."""
        return int(self.producer[self.rows].shape[0] if self.is_norm else self._rows().shape[-2])

    @property
    def num_experts(self) -> int:
        """That have scales of their own."""
        return len(self.producer) if self.producer.ndim == 3 else 1

    def _rows(self) -> torch.Tensor:
        return self.producer.detach()[..., self.rows, :]

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Of each scale [..., n] those of the inputs [..., I] that are read from it."""
        size, count = self.heads
        parts = scales.reshape(*scales.shape[:-1], -1, size).repeat_interleave(count, -2)
        found: torch.Tensor = parts.flatten(-2)
        return found

    def gather(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of values [I] of the inputs, the means [n] over those with the same scale."""
        size, count = self.heads
        return inputs.view(-1, count, size).mean(1).flatten()

    @torch.no_grad()
    def fold(self, scales_En: torch.Tensor, stored: torch.dtype = torch.float32) -> torch.Tensor:
        """Divide and multiply; returns the real scales. The norm's weight is rounded to ``stored``,
        and what that changes is left to the other side, so that it stays exact."""
        if not self.is_norm:
            rows = self._rows()
            rows.div_(scales_En.view(*rows.shape[:-1], 1))
            if self.bias is not None:
                self.bias[self.rows].div_(scales_En[0])
        else:
            scales_En = self._fold_norm(scales_En[0], stored)[None]
        self.multiply(scales_En)
        return scales_En

    @torch.no_grad()
    def multiply(self, scales_En: torch.Tensor) -> None:
        """The columns of the consumers."""
        factors = self.spread(scales_En)
        for weight in self.consumers:
            weight.mul_(factors[:, None] if weight.ndim == 3 else factors[0])

    def _fold_norm(self, scales_n: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        one = float(self.has_one)
        before = self.producer + one
        found = (before / scales_n - one).to(stored).to(before.dtype)
        real_n = before / (found + one)
        is_lost = ~real_n.isfinite() | (real_n <= 0)
        real_n[is_lost] = 1
        self.producer.copy_(torch.where(is_lost, self.producer, found))
        if self.bias is not None:
            self.bias.div_(real_n)
        return real_n


@dataclass(frozen=True, eq=False)
class _Linear:
    """A linear map that was computed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    inputs: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Norm:
    """A norm that was computed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    outputs: torch.Tensor


def find_foldings(
    layer: nn.Module, hidden: torch.Tensor, call: Call, head_size: int, wanted: set[int]
) -> list[Folding]:
    """The foldings of a loaded ``layer`` that change nothing on the row ``hidden`` [1, T, D], those
    with a consumer whose id is in ``wanted``."""
    events = _trace(layer, hidden, call)
    expected = _computed(layer, hidden, call)
    found, done = list[Folding](), set[int]()
    for candidates in chain(_from_norms(events), _from_linear(events, head_size, wanted)):
        for one in candidates:
            ids = {id(weight) for weight in one.consumers}
            if not ids & wanted or ids & done:
                continue
            if _is_exact(one, layer, hidden, call, expected):
                found.append(one)
                done |= ids
                break
    return found


def _trace(layer: nn.Module, hidden: torch.Tensor, call: Call) -> list[_Linear | _Norm]:
    """What the layer computes, in order."""
    weights, biases = _weights_in(layer)
    events = list[_Linear | _Norm]()

    def normed(module: nn.Module, _: object, outputs: object) -> None:
        weight = module.get_parameter("weight")
        if isinstance(outputs, torch.Tensor):
            events.append(_Norm(weight, module._parameters.get("bias"), outputs))

    def seen(inputs: torch.Tensor, weight: torch.Tensor) -> None:
        if (found := weights.get(place(weight))) is not None:
            events.append(_Linear(found, biases.get(id(found)), inputs))

    with ExitStack() as stack:
        for module in layer.modules():
            if _is_norm(module):
                stack.callback(module.register_forward_hook(normed).remove)
        with LinearCalls(seen):
            run(layer, hidden, call)
    return events


def _weights_in(layer: nn.Module) -> tuple[dict[Place, nn.Parameter], dict[int, nn.Parameter]]:
    """The parameter in each place, for experts in several; of each, by its id, the bias."""
    weights, biases = dict[Place, nn.Parameter](), dict[int, nn.Parameter]()
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            views = parameter.detach() if parameter.ndim == 3 else [parameter.detach()]
            weights |= {place(view): parameter for view in views}
            if name == "weight" and (bias := module._parameters.get("bias")) is not None:
                biases[id(parameter)] = bias
    return weights, biases


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    others = module._parameters.keys() - {"weight", "bias"}
    return weight is not None and weight.ndim == 1 and not others


def _from_norms(events: Sequence[_Linear | _Norm]) -> Iterator[list[Folding]]:
    """For each norm the layers that read its outputs, without and with the experts that get some of
    its tokens."""
    for index, norm in enumerate(events):
        if not isinstance(norm, _Norm):
            continue
        after = events[index + 1 :]
        size = len(norm.weight)
        linear = [e for e in after if isinstance(e, _Linear) and e.weight.shape[-1] == size]
        direct = [e for e in linear if _same(e.inputs, norm.outputs)]
        if not direct:
            continue
        stop = next((i for i, e in enumerate(after) if isinstance(e, _Norm)), len(after))
        until = {id(e) for e in after[:stop]}
        experts = _weights([e for e in linear if id(e) in until and e.weight.ndim == 3])
        own = _weights(direct)
        yield [
            Folding(norm.weight, norm.bias, (*own, *experts[:count]), has_one=has_one)
            for count in range(len(experts) + 1)
            for has_one in (False, True)
        ]


def _from_linear(
    events: Sequence[_Linear | _Norm], head_size: int, wanted: set[int]
) -> Iterator[list[Folding]]:
    """For each linear layer some of those before it, the nearest first."""
    linear = [e for e in events if isinstance(e, _Linear)]
    first = {id(e.weight): i for i, e in reversed(list(enumerate(linear)))}
    for consumer in _weights(linear):
        before = [w for w in _weights(linear[: first[id(consumer)]]) if id(w) in wanted]
        found = list[Folding]()
        for producer in before[: -_NEAREST - 1 : -1]:
            if producer.shape[:-2] != consumer.shape[:-2]:
                continue
            bias = next(e.bias for e in linear if e.weight is producer)
            found += _of_rows(Folding(producer, bias, (consumer,)), head_size)
        yield found


def _of_rows(plain: Folding, head_size: int) -> Iterator[Folding]:
    """The rows of a producer that may be what the consumer reads: all, the last of several parts,
    or the first."""
    (consumer,) = plain.consumers
    outputs, inputs = plain.producer.shape[-2], consumer.shape[-1]
    values = (outputs - inputs) // 2  # of queries, keys and values in one
    for count in dict.fromkeys((min(outputs, inputs), values)):
        if count < 1 or inputs % count or (count < inputs and count % head_size):
            continue
        heads = (head_size, inputs // count) if count < inputs else (1, 1)
        for start in dict.fromkeys((outputs - count, 0)):
            yield replace(plain, rows=slice(start, start + count), heads=heads)


def _weights(linear: Sequence[_Linear]) -> tuple[nn.Parameter, ...]:
    return tuple({id(e.weight): e.weight for e in linear}.values())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are the same values in memory."""
    return place(one) == place(other)


@torch.no_grad()
def _is_exact(
    folding: Folding,
    layer: nn.Module,
    hidden: torch.Tensor,
    call: Call,
    expected: Sequence[torch.Tensor],
) -> bool:
    """Whether the layer computes ``expected`` with any scales."""
    generator = torch.Generator().manual_seed(0)
    shape = folding.num_experts, folding.num_scales
    scales = 2.0 ** torch.randint(-2, 3, shape, generator=generator)
    scales = scales.to(hidden.device)
    kept = [(t, t.detach().clone()) for t in (folding.producer, folding.bias) if t is not None]
    real = folding.fold(scales)
    found = _computed(layer, hidden, call)
    for tensor, values in kept:
        tensor.copy_(values)
    folding.multiply(1 / real)
    is_proof = bool((real != 1).any())  # a norm whose weights are all 0 cannot be divided
    return is_proof and all(map(_nearly_equal, found, expected))


def _computed(layer: nn.Module, hidden: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """What the layer adds to the hidden states, and what it may have left for others: keys and
    values, for example, that layers without their own read from a dictionary."""
    added = run(layer, hidden, call) - hidden
    args, kwargs = call
    mappings = [one for one in (*args, *kwargs.values()) if isinstance(one, Mapping)]
    return [added, *chain.from_iterable(map(_tensors_in, mappings))]


def _tensors_in(one: object) -> Iterator[torch.Tensor]:
    if isinstance(one, torch.Tensor):
        yield one
    elif isinstance(one, Mapping):
        yield from chain.from_iterable(map(_tensors_in, one.values()))
    elif isinstance(one, list | tuple):
        yield from chain.from_iterable(map(_tensors_in, one))


def _nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    error = (one - other).double().norm()
    return bool(error <= _EXACT * other.double().norm())
