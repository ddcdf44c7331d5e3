"""State in few bits: bfloat16, rounded stochastically (arXiv:2010.06192), and codes of 8 or 4 bits,
each block of a row with a scale (arXiv:2110.02861, arXiv:2309.01507).

The noise of rounding is a function of the update's number, a name and this rank's place in the
sharding, so that a resumed run repeats it. The values of the codes are those of bitsandbytes'
dynamic map, and of torchao's for 4 bits. Written in torch alone, so that rows can be sharded and
saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed.tensor import DTensor, Shard

_ELEMENTS = {"cpu": 1 << 17}  # 512 KiB in float32
_OTHERS = 1 << 25  # elements; a GPU wants few large kernels


def chunked(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """A large update, some rows at a time: its temporaries are small, and a CPU finds them in its
    cache, which makes it three times as fast.

    The same rows of all ``tensors``, which have equal shapes up to the last dimension. Vectors
    have one row for each number. Tensors that are not contiguous come in one piece."""
    first = tensors[0]
    if not first.numel():
        return
    max_elements = _ELEMENTS.get(first.device.type, _OTHERS)
    if first.numel() <= max_elements or not all(each.is_contiguous() for each in tensors):
        yield tensors
        return
    rows = [each.view(-1, each.shape[-1] if first.ndim > 1 else 1) for each in tensors]
    count = max(1, max_elements // rows[0].shape[1])
    yield from zip(*(torch.split(each, count) for each in rows), strict=True)


_LOW = 16  # bits that float32 has and bfloat16 has not
_MASK = (1 << _LOW) - 1


def round_stochastically(
    wide: torch.Tensor, into: torch.Tensor, noise: torch.Generator
) -> torch.Tensor:
    """Round float32 ``wide`` to bfloat16 ``into``: to one of the two values around each, to the
    upper one with the probability that makes the mean right."""
    for values, rounded in chunked(wide, into):
        bits = _uniform(values, noise).add_(values.view(torch.int32)).bitwise_and_(~_MASK)
        noisy = bits.view(torch.float32)
        if not _is_finite(values):  # adding to the bits of NaN could overflow to another value
            noisy = torch.where(values.isfinite(), noisy, values)
        rounded.copy_(noisy)
    return into


def _uniform(like: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Integers of 16 bits, in int32, for each element: one draw of 64 bits is four of them."""
    count = like.numel()
    # A hash of each element's index would be the same for every mesh, but is ten passes over memory
    # for one (decisions/0044).
    drawn = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device)
    # With bounds: without any, torch draws no negative number, and one of the four has 15 bits.
    drawn.random_(-(1 << 63), None, generator=noise)
    pairs = drawn.view(torch.int32)
    integers = torch.empty(2 * len(pairs), dtype=torch.int32, device=like.device)
    torch.bitwise_and(pairs, _MASK, out=integers[: len(pairs)])
    torch.bitwise_right_shift(pairs, _LOW, out=integers[len(pairs) :]).bitwise_and_(_MASK)
    return integers[:count].view(like.shape)


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are known to be finite, where asking costs little."""
    # A sum that overflows says no as well, which costs a pass and changes no bit.
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


_CELLS = 1 << 16  # numbers with the same upper 16 bits: sign, exponent, 7 bits of the fraction
_BITS_BELOW = 16


@dataclass(frozen=True)
class Codebook:
    """The numbers in [-1, 1] or [0, 1] that codes stand for, sorted, and what finds the nearest."""

    values: torch.Tensor  # float32
    middles: torch.Tensor  # between one value and the next; the last is infinite
    first: torch.Tensor  # uint8: the code of the smallest number of each cell
    pairs: torch.Tensor  # of 4 bits: the two values that each byte stands for
    block: int  # numbers of a row that have one scale

    @property
    def is_packed(self) -> bool:
        """Whether a byte has two codes."""
        return len(self.values) == 16


@cache
def codebook(bits: int, block: int, device: torch.device, *, is_signed: bool) -> Codebook:
    """The codes of moments: signed ones of the first, the others of the second."""
    if bits == 4 and not is_signed:  # without zero: it divides
        values = torch.linspace(0, 1, 17)[1:]
    else:
        values = dynamic_map(bits, is_signed=is_signed)
    middles = (values[1:] + values[:-1]) / 2
    # torchao's second moment becomes zero here, and the next update of a token without gradient was
    # up to a thousand times too large (decisions/0046).
    if not is_signed and not values[0]:  # a second moment is zero only if it is: it divides
        middles[0] = 0.0
    smallest = _smallest_of_cells()
    first = torch.bucketize(smallest, middles).masked_fill_(smallest.isnan(), 0)
    return Codebook(
        values.to(device),
        torch.cat([middles, torch.tensor([float("inf")])]).to(device),
        first.to(torch.uint8).to(device),
        torch.cartesian_prod(values, values).flip(1).to(device) if bits == 4 else values,
        block,
    )


def dynamic_map(bits: int, *, is_signed: bool) -> torch.Tensor:
    """All values of a code, sorted, in [-1, 1] or [0, 1]: as many powers of ten as it has bits but
    one, with more values between larger ones."""
    values = [0.0, 1.0]
    for exponent in range(bits - 1):
        count = 2**exponent if is_signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - bits + 2)
        values += [*means.tolist(), *((-means).tolist() if is_signed else [])]
    return torch.tensor(sorted(values), dtype=torch.float32)


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, width: int, book: Codebook
) -> torch.Tensor:
    """The numbers, in rows of ``width``, that codes and scales stand for; float32."""
    index = codes.reshape(-1).int()
    if book.is_packed:
        decoded = book.pairs.index_select(0, index).view(*codes.shape[:-1], -1)[..., :width]
    else:
        decoded = book.values.index_select(0, index).view(codes.shape)
    for numbers, scale in _blocks(decoded, scales, book.block):
        numbers.mul_(scale)
    return decoded


def quantize(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, book: Codebook
) -> None:
    """Write the nearest codes of ``values``, which are overwritten, and the scale of each block."""
    tiny = torch.finfo(scales.dtype).tiny
    for numbers, scale in _blocks(values, scales, book.block):
        scale.copy_(numbers.abs().amax(-1, keepdim=True))
        # A block of zeros has the scale 0, and 0 / 0 is no number.
        numbers.div_(scale.clamp(min=tiny))
    nearest = _nearest(values.reshape(-1), book).view(values.shape)
    if book.is_packed:
        nearest = torch.nn.functional.pad(nearest, (0, values.shape[-1] % 2))
        nearest = nearest[..., 1::2].bitwise_left_shift(4).bitwise_or_(nearest[..., ::2])
    codes.copy_(nearest)


def _nearest(values: torch.Tensor, book: Codebook) -> torch.Tensor:
    """The code of the nearest of the book's values, for each of these. No cell has two middles."""
    cell = values.view(torch.int32).bitwise_right_shift(_BITS_BELOW).add_(_CELLS // 2)
    codes = book.first.index_select(0, cell)
    return codes.add_(values.gt(book.middles.index_select(0, codes.int())))


def _smallest_of_cells() -> torch.Tensor:
    """The smallest number of each cell, in the order of the numbers' bits as integers."""
    upper = torch.arange(-_CELLS // 2, _CELLS // 2, dtype=torch.int32)
    low = upper << _BITS_BELOW
    low[: _CELLS // 2] |= _CELLS - 1  # of a negative number, more bits are less
    return low.view(torch.float32)


def _blocks(
    rows: torch.Tensor, scales: torch.Tensor, block: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The blocks of ``rows``, with the scales beside each: the full ones, and a rest."""
    full, rest = divmod(rows.shape[-1], block)
    blocks_and_scales = []
    if full:
        blocks = torch.unflatten(rows[..., : full * block], -1, (full, block))
        blocks_and_scales.append((blocks, scales[..., :full, None]))
    if rest:
        blocks_and_scales.append((rows[..., full * block :], scales[..., full:]))
    return blocks_and_scales
