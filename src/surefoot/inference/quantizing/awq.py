"""AWQ (arXiv:2306.00978): before weights are rounded, columns that read large inputs are multiplied
by scales, by which the layer before divides. So these columns lose less.

Legend of shapes: O outputs, I inputs, E experts, n scales of a folding. With inputs X [N, I], what
is minimized is ||X (Q(W s) / s - W)'||^2 = tr(D X'X D'), summed over the layers that share scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...model.pretrained.weights import place
from .foldings import Folding
from .inputs import InputStatistics, Place
from .schemes import WeightScheme

GRID = 20  # exponents between 0, which is plain rounding, and 1
_SMALLEST = 1e-4  # mean magnitude of an input that the exponents distinguish


@dataclass(frozen=True)
class Reader:
    """A matrix that reads scaled inputs."""

    weight: torch.Tensor  # [O, I]
    gram: torch.Tensor  # [I, I], X'X of its inputs


def round_to_nearest(
    weight_OI: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> torch.Tensor:
    """The values that ``weight_OI`` has in the file, if scales are stored in ``dtype``."""
    high = 2 ** (scheme.args.num_bits - 1) - 1
    scales_OG = scheme.scales(weight_OI.to(dtype))[0].float()
    scales_OI = scales_OG.repeat_interleave(weight_OI.shape[1] // scales_OG.shape[1], 1)
    return (weight_OI / scales_OI).round().clamp(-high - 1, high) * scales_OI


def error_of(
    reader: Reader, scales_I: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> float:
    """The squared error of all outputs."""
    found_OI = round_to_nearest(reader.weight * scales_I, scheme, dtype) / scales_I
    change_OI = found_OI - reader.weight
    return float(((change_OI @ reader.gram) * change_OI).sum(dtype=torch.float64))


def best_scales(
    readers: Sequence[Reader],
    magnitudes_n: torch.Tensor,
    folding: Folding,
    scheme: WeightScheme,
    dtype: torch.dtype,
    *,
    in_powers_of_two: bool = False,
) -> torch.Tensor | None:
    """The scales [n] of least error among powers of the mean magnitudes; None if those are 1."""
    found, least = None, float("inf")
    for step in range(GRID + 1):
        scales_n = magnitudes_n.clamp(min=_SMALLEST) ** (step / GRID)
        scales_n = scales_n / (scales_n.max() * scales_n.min()).sqrt()
        if in_powers_of_two:
            scales_n = scales_n.log2().round().exp2()
        spread_I = folding.spread(scales_n)
        error = sum(error_of(reader, spread_I, scheme, dtype) for reader in readers)
        if error < least:
            found, least = (scales_n if step else None), error
    return found


def scales_of(
    folding: Folding,
    statistics: Mapping[Place, InputStatistics],
    scheme: WeightScheme,
    dtypes: Mapping[int, torch.dtype],
) -> torch.Tensor | None:
    """The scales [E, n] of a folding; None if no other than 1 is better, or its readers got no
    tokens. ``dtypes`` has those of the files, by parameter that is quantized."""
    if folding.producer.ndim < 3:
        parts = [(w, view) for w in folding.consumers for view in _matrices(w)]
        found = _best(folding, parts, statistics, scheme, dtypes)
        return None if found is None else found[None]
    (consumer,) = folding.consumers
    each = [_best(folding, [(consumer, w)], statistics, scheme, dtypes) for w in consumer.detach()]
    if all(one is None for one in each):
        return None
    ones = torch.ones(folding.num_scales, device=consumer.device)
    return torch.stack([ones if one is None else one for one in each])


def _matrices(weight: nn.Parameter) -> Sequence[torch.Tensor]:
    return list(weight.detach()) if weight.ndim == 3 else [weight.detach()]


def _best(
    folding: Folding,
    parts: Sequence[tuple[nn.Parameter, torch.Tensor]],
    statistics: Mapping[Place, InputStatistics],
    scheme: WeightScheme,
    dtypes: Mapping[int, torch.dtype],
) -> torch.Tensor | None:
    """The scales [n] of the matrices of some parameters."""
    known = [(p, w, statistics[place(w)]) for p, w in parts if place(w) in statistics]
    known = [one for one in known if id(one[0]) in dtypes]
    if not known:
        return None
    readers = [Reader(weight, inputs.gram) for _, weight, inputs in known]
    tokens = sum(inputs.num_tokens for *_, inputs in known)
    magnitudes_I = torch.stack([inputs.magnitudes for *_, inputs in known]).sum(0) / tokens
    dtype = dtypes[id(known[0][0])]
    is_exact = any(id(weight) not in dtypes for weight in folding.consumers)  # a router, stored
    return best_scales(
        readers,
        folding.gather(magnitudes_I),
        folding,
        scheme,
        dtype,
        in_powers_of_two=is_exact,
    )
