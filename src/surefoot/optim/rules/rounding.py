"""Round float32 to bfloat16 stochastically (arXiv:2010.06192), with noise that a resumed run
repeats: a function of the update's number, a name and this rank's place in the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.tensor import DTensor, Shard

from .chunks import chunked

_LOW = 16  # bits that float32 has and bfloat16 has not
_MASK = (1 << _LOW) - 1


def round_stochastically(
    wide: torch.Tensor, into: torch.Tensor, noise: torch.Generator
) -> torch.Tensor:
    """Round float32 ``wide`` to bfloat16 ``into``: to one of the two values around each, to the
    upper one with the probability that makes the mean right."""
    for values, rounded in chunked(wide, into):
        bits = _uniform(values, noise).add_(values.view(torch.int32)).bitwise_and_(~_MASK)
        found = bits.view(torch.float32)
        if not _is_finite(values):  # adding to the bits of NaN could overflow to another value
            found = torch.where(values.isfinite(), found, values)
        rounded.copy_(found)
    return into


def _uniform(like: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Integers of 16 bits, in int32, for each element: one draw of 64 bits is four of them."""
    count = like.numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(1 << 63), None, generator=noise)
    pairs = drawn.view(torch.int32)
    found = torch.empty(2 * len(pairs), dtype=torch.int32, device=like.device)
    torch.bitwise_and(pairs, _MASK, out=found[: len(pairs)])
    torch.bitwise_right_shift(pairs, _LOW, out=found[len(pairs) :]).bitwise_and_(_MASK)
    return found[:count].view(like.shape)


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are known to be finite, where asking costs little."""
    return values.is_cpu and bool(values.sum().isfinite())


def noise_for(number: int, name: str, parameter: torch.Tensor) -> torch.Generator:
    """The noise for update ``number`` of this rank's shard of a parameter."""
    return _noise(parameter.device).manual_seed(_seed(number, name, parameter))


@cache
def _noise(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _seed(number: int, name: str, parameter: torch.Tensor) -> int:
    """The seed of the noise for update ``number`` of this rank's shard of a parameter."""
    text = f"{number} {_place(parameter)} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _place(parameter: torch.Tensor) -> Sequence[int]:
    """This rank's coordinates along the axes of the mesh that shard it."""
    if not isinstance(parameter, DTensor):
        return ()
    at = parameter.device_mesh.get_coordinate() or ()
    placed = zip(at, parameter.placements, strict=True)
    return [place for place, how in placed if isinstance(how, Shard)]
