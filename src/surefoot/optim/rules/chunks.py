"""A large update, some rows at a time: its temporaries are small, and a CPU finds them in its
cache, which makes it three times as fast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ELEMENTS = {"cpu": 1 << 17}  # 512 KiB in float32
_OTHERS = 1 << 25  # elements; a GPU wants few large kernels


def chunked(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of all ``tensors``, which have equal shapes up to the last dimension. Vectors
    have one row for each number. Tensors that are not contiguous come in one piece."""
    first = tensors[0]
    if not first.numel():
        return
    most = _ELEMENTS.get(first.device.type, _OTHERS)
    if first.numel() <= most or not all(each.is_contiguous() for each in tensors):
        yield tensors
        return
    rows = [each.view(-1, each.shape[-1] if first.ndim > 1 else 1) for each in tensors]
    count = max(1, most // rows[0].shape[1])
    yield from zip(*(torch.split(each, count) for each in rows), strict=True)
