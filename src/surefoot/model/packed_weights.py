"""Products of few rows on a CPU in float32: oneDNN's, with weights in the order it reads them.

A step of generation has a token of each row, and torch's own product (MKL's) of 4 to 64 rows takes
one and a half to three times as long as oneDNN's with packed weights. Packing costs as much as some
ten steps. Both take the same time for prompts. With oneDNN's, too, a row has the same bits whatever
the number of rows and threads, and whether the weights are packed or not.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..storage.memory import free_memory

logger = logging.getLogger(__name__)
_SHARE = 0.5  # of the memory that is available to a process, for packed weights
_ROWS = 8  # of the products that weights are packed for; products of more use them as well


class StepLinear(nn.Linear):
    """A linear layer whose products for a step are oneDNN's."""

    packed: torch.Tensor  # ``weight``, or what oneDNN has made of it

    def forward(self, x_BTK: torch.Tensor) -> torch.Tensor:
        """The product of the weights and ``x_BTK``; T is 1 in a step. Prompts, other dtypes and
        what is differentiated have torch's own product."""
        is_step = x_BTK.dim() == 3 and x_BTK.shape[1] == 1 and x_BTK.dtype == torch.float32
        if not is_step or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(x_BTK)
        product = torch.ops.mkldnn._linear_pointwise
        found: torch.Tensor = product(x_BTK, self.packed, self.bias, "none", [], "")
        return found


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """A block in which no weight of ``model`` changes, with steps computed by oneDNN: see
    ``pack_weights``, which may pack adapters here, too."""
    layers = [layer for layer in model.modules() if _is_plain(layer)]
    try:
        _pack(layers)
        yield
    finally:
        for layer in layers:
            if isinstance(layer, StepLinear):
                layer.__class__ = nn.Linear  # type: ignore[assignment]
                del layer.packed


def pack_weights(model: nn.Module, available: int | None = None) -> int:
    """Give the linear layers of ``model`` oneDNN's products, and pack their weights, if the copy
    takes no more than half of the ``available`` bytes (those that the machine has for this
    process). The weights must not change afterwards. The matrices of adapters are left as they are,
    since adapters come later, too. Returns the bytes of the copy."""
    named = model.named_modules()
    layers = [layer for name, layer in named if ".lora_" not in name and _is_plain(layer)]
    return _pack(layers, available)


def _pack(layers: list[nn.Module], available: int | None = None) -> int:
    if not layers or not _has_products():
        return 0
    size = sum(one.weight.nbytes for one in layers)
    room = _room() if available is None else available
    is_packed = size <= room * _SHARE
    for layer in layers:
        weight = layer.weight.detach()
        layer.packed = _packed(weight) if is_packed else weight
        layer.__class__ = StepLinear
    if not is_packed:
        logger.warning(
            "packed weights would take %.1f GiB of the %.1f GiB that are available, so responses "
            "are generated more slowly, without them",
            size / 2**30,
            room / 2**30,
        )
    return size if is_packed else 0


def _room() -> float:
    """Bytes for this process: ranks on one machine pack at the same time."""
    free, ranks = free_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return math.inf if free is None else free / ranks


def _is_plain(layer: nn.Module) -> bool:
    """Whether it is torch's own layer, and its weights are in ordinary memory of the CPU, in
    float32. (Weights that are sharded are not.)"""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._compiled_call_impl:
        return False
    weight = layer.weight
    is_float = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_float and type(weight.data) is torch.Tensor


def _has_products() -> bool:
    """Whether this torch has oneDNN's products."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in names
    )


def _packed(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return found
