"""Products of few rows on a CPU in float32: oneDNN's, with weights in the order it reads them.

A step has a token of each row, and torch's own product (MKL's) of 8 rows takes two to three times
as long as oneDNN's with packed weights. Both take the same time for prompts. With oneDNN's, too, a
row has the same bits whatever the number of rows and threads, and whether the weights are packed or
not.
"""

from __future__ import annotations

import logging

import psutil
import torch
from torch import nn

logger = logging.getLogger(__name__)
_SHARE = 0.5  # of the memory that is available, for packed weights
_ROWS = 8  # of the products that weights are packed for


class StepLinear(nn.Linear):
    """A linear layer whose products for a step are oneDNN's."""

    packed: torch.Tensor  # ``weight``, or what oneDNN has made of it

    def forward(self, x_BTK: torch.Tensor) -> torch.Tensor:
        """The product of the weights and ``x_BTK``; T is 1 in a step."""
        if x_BTK.dim() != 3 or x_BTK.shape[1] != 1:
            return super().forward(x_BTK)
        product = torch.ops.mkldnn._linear_pointwise
        found: torch.Tensor = product(x_BTK, self.packed, self.bias, "none", [], "")
        return found


def pack_weights(model: nn.Module, available: int | None = None) -> int:
    """Give the linear layers of ``model`` oneDNN's products, and pack their weights, if the copy
    takes no more than half of the ``available`` bytes (those of the machine). The weights must not
    change afterwards. The matrices of adapters are left as they are, since adapters come later,
    too. Returns the bytes of the copy."""
    layers = [
        layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and ".lora_" not in name and _is_plain(layer.weight)
    ]
    if not layers or not _has_products():
        return 0
    size = sum(one.weight.nbytes for one in layers)
    room = psutil.virtual_memory().available if available is None else available
    is_packed = size <= room * _SHARE
    for layer in layers:
        layer.__class__ = StepLinear
        weight = layer.weight.detach()
        layer.packed = _packed(weight) if is_packed else weight
    if not is_packed:
        logger.warning(
            "packed weights would take %.1f GiB of the %.1f GiB that are available, so responses "
            "are generated more slowly, without them",
            size / 2**30,
            room / 2**30,
        )
    return size if is_packed else 0


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether the values are in ordinary memory of the CPU, in float32."""
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
