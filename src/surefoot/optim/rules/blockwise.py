"""Numbers in 8 bits, each block of a row with a scale (arXiv:2110.02861).

The 256 values of a code are those of bitsandbytes' dynamic map. Written in torch alone, so that
rows can be sharded and saved.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def dynamic_map(*, is_signed: bool) -> torch.Tensor:
    """The 256 values of a code, sorted, in [-1, 1] or [0, 1]: seven powers of ten, with more values
    between larger ones."""
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if is_signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*means.tolist(), *((-means).tolist() if is_signed else [])]
    return torch.tensor(sorted(values), dtype=torch.float32)


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, *, block: int, is_signed: bool
) -> torch.Tensor:
    """The numbers that codes and scales stand for; float32."""
    known = dynamic_map(is_signed=is_signed).to(codes.device)
    return known[codes.int()] * _spread(scales, block, codes.shape[-1])


def quantize(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    block: int,
    is_signed: bool,
) -> None:
    """Write the nearest codes of ``values``, and the scale of each block of a row."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.shape[-1] % block))
    scales.copy_(padded.view(*values.shape[:-1], -1, block).amax(-1))
    known = dynamic_map(is_signed=is_signed).to(values.device)
    tiny = torch.finfo(scales.dtype).tiny
    relative = values / _spread(scales, block, values.shape[-1]).clamp(min=tiny)
    codes.copy_(torch.bucketize(relative, (known[1:] + known[:-1]) / 2))


def _spread(scales: torch.Tensor, block: int, width: int) -> torch.Tensor:
    return scales.repeat_interleave(block, -1)[..., :width]
