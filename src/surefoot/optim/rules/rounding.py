"""Round float32 to bfloat16 stochastically (arXiv:2010.06192), with noise that a resumed run
repeats: a function of the update's number, a name and this rank's place in the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.tensor import DTensor, Shard

_CHUNK = 1 << 22  # elements that get noise at once
_LOW = 16  # bits that float32 has and bfloat16 has not


def round_stochastically(
    wide: torch.Tensor, into: torch.Tensor, noise: torch.Generator
) -> torch.Tensor:
    """Round float32 ``wide`` to bfloat16 ``into``: to one of the two values around each, to the
    upper one with the probability that makes the mean right."""
    is_flat = wide.is_contiguous() and into.is_contiguous()
    pairs = [(wide, into)]
    if is_flat:
        parts = (torch.split(each.view(-1), _CHUNK) for each in (wide, into))
        pairs = list(zip(*parts, strict=True))
    for values, rounded in pairs:
        bits = torch.randint(
            1 << _LOW, values.shape, generator=noise, device=values.device, dtype=torch.int32
        )
        bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << _LOW))
        # adding to the bits of NaN could overflow to another value
        rounded.copy_(torch.where(values.isfinite(), bits.view(torch.float32), values))
    return into


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
