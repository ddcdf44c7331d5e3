"""oneDNN's products of matrices for sampling, on a CPU in float32, instead of torch's own (MKL's).

On AMD's processors with AVX-512, MKL uses half of the units: of 64 rows to thousands, oneDNN's
products take half as long. With weights in the order that oneDNN reads, which is a copy, those of
few rows do, too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ..log import fell_back
from ..storage.memory import free_memory

logger = logging.getLogger(__name__)
_SLOWER = "is slower"
_SHARE = 0.5  # of the free memory, for packed weights
_ROWS = 8  # of the products that weights are packed for; other products use them as well
_FEW = 2  # rows of the products that torch computes


class OneDnnLinear(nn.Linear):
    """A linear layer whose products are oneDNN's, unless they are differentiated or in few bits."""

    packed: torch.Tensor | None = None  # what oneDNN has made of ``weight``

    def forward(self, x_BTK: torch.Tensor) -> torch.Tensor:
        """The product of the weights and ``x_BTK``."""
        # One or two rows wait for the weights from memory. torch's product then takes as long, or
        # half as long where the weights are small: 63 us, not 105, for 512 x 512 on an Intel Xeon.
        if x_BTK.numel() <= _FEW * self.in_features:
            return F.linear(x_BTK, self.weight, self.bias)
        # a layer may be sharded, and have whole weights only while it computes
        weight = self.weight if self.packed is None else self.packed
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not _fits(weight, x_BTK):
            return super().forward(x_BTK)
        product = torch.ops.mkldnn._linear_pointwise
        y_BTN: torch.Tensor = product(x_BTK, weight, self.bias, "none", [], "")
        return y_BTN


def _fits(weight: torch.Tensor, x_BTK: torch.Tensor) -> bool:
    """Whether both are in ordinary memory of the CPU, in float32. Tokens that are routed to an
    expert have other dimensions, and any number of rows."""
    is_whole = type(weight) in (torch.Tensor, nn.Parameter) and type(x_BTK) is torch.Tensor
    is_float = weight.dtype == x_BTK.dtype == torch.float32
    return is_whole and is_float and x_BTK.dim() == 3 and weight.device.type == "cpu"


@contextmanager
def onednn_products(model: nn.Module) -> Iterator[None]:
    """A block in which products of ``model`` are oneDNN's, also where its weights are sharded by
    FSDP, so that samples do not depend on it."""
    layers = list(_linear_layers(model).values())
    for layer in layers:
        layer.__class__ = OneDnnLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


def pack_weights(
    model: nn.Module, free: int | None = None, *, batch_invariant: bool = False
) -> int:
    """Give the linear layers of ``model`` oneDNN's products for good, and pack their weights, if
    the copy takes no more than half of the ``free`` bytes (those of the machine). The weights must
    not change afterwards. The matrices of adapters are left as they are, since adapters come later,
    too. Weights of products that are not packed keep their layout, and so these their bits, with
    ``batch_invariant``. Returns the bytes of the copy."""
    linear_layers = _linear_layers(model).items()
    layers = [layer for name, layer in linear_layers if ".lora_" not in name and _is_float(layer)]
    size = sum(layer.weight.nbytes for layer in layers)
    room = free_memory() if free is None else free
    is_packed = room is None or size <= room * _SHARE
    every = (weight for module in model.modules() for weight in module._parameters.values())
    counts = Counter(map(id, every))
    for layer in layers:
        layer.__class__ = OneDnnLinear
        if is_packed:
            layer.packed = _packed(layer.weight.detach())
            if not batch_invariant and counts[id(layer.weight)] == 1:
                _lay_out(layer)
    if room is not None and not is_packed:
        sizes = f"take {size / 2**30:.1f} GiB of the {room / 2**30:.1f} GiB that are free"
        fell_back("responses are generated without packed weights", f"they would {sizes}", _SLOWER)
    return size if is_packed else 0


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """torch's own on the CPU, neither compiled nor changed, by name; none where this torch does not
    have oneDNN's products."""
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu"
        if not layer._compiled_call_impl and "forward" not in vars(layer)
    }
    return layers if layers and _has_onednn() else {}


@cache
def _has_onednn() -> bool:
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if is_there and all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return True
    what = "responses are generated with torch's products on a CPU"
    fell_back(what, "this torch has no oneDNN", _SLOWER)
    return False


def _is_float(layer: nn.Linear) -> bool:
    return layer.weight.dtype == torch.float32 and type(layer.weight.data) is torch.Tensor


def _lay_out(layer: nn.Linear) -> None:
    """Let the inputs be the rows in memory of a weight with more outputs, as torch then computes
    one row in three quarters of the time: 216 us, not 282, for 1408 x 512 on an Intel Xeon. Not for
    a weight that is an embedding, too, whose rows are read as they are."""
    if layer.out_features > layer.in_features:
        layer.weight.data = layer.weight.data.t().contiguous().t()


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed
