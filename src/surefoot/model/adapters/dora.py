"""DoRA's magnitudes and lengths in float32, whatever the type of the base.

PEFT rounds both to the type of the base. In bfloat16 a magnitude is then wrong by up to 0.4 %, in
the first step as well as in merged weights. It also unpacks an 8-bit base in a way that a CPU does
not survive. The forward pass here takes the place of that of PEFT's module of magnitudes; modules,
names and files remain PEFT's.

Shapes: O and I the sizes of output and input, R rank.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..pretrained.quantized import dequantized

if TYPE_CHECKING:  # slow to import, and here only a name
    from peft.tuners.lora.dora import DoraLinearLayer


def enable_float32_lengths(model: nn.Module) -> None:
    """Compute lengths in float32 in every linear layer of ``model`` that has magnitudes."""
    for module in _magnitudes(model).values():
        module.forward = partial(_forward, module)


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Let the magnitudes of a new adapter, whose ``B`` is 0, be the lengths of the base's rows."""
    for name, module in _magnitudes(model).items():
        base = model.get_submodule(name.rpartition(".lora_magnitude_vector.")[0])
        weight = dequantized(base.get_base_layer())  # type: ignore[operator]
        if not weight.is_meta:
            rows = weight.T if module.fan_in_fan_out else weight
            module.weight.copy_(lengths(rows))


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """The length of each row, in float32 or the type of ``rows``, if that is more exact."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    found: torch.Tensor = torch.linalg.norm(rows.to(exact), dim=1)
    return found


def has_exact_lengths(module: nn.Module) -> bool:
    """Whether a module of magnitudes is a linear layer's, not an embedding's."""
    from peft.tuners.lora.dora import DoraLinearLayer

    return type(module) is DoraLinearLayer


def _magnitudes(model: nn.Module) -> dict[str, DoraLinearLayer]:
    """Those of linear layers, by name."""
    found = ((name, m) for name, m in model.named_modules() if name.count("lora_magnitude_vector."))
    return {name: module for name, module in found if has_exact_lengths(module)}


def _forward(
    module: DoraLinearLayer,
    x: torch.Tensor,
    *,
    lora_A: nn.Linear,
    lora_B: nn.Linear,
    scaling: float,
    base_layer: Any,
    base_result: torch.Tensor | None = None,
    **_: object,  # the name of the adapter
) -> torch.Tensor:
    """What is added to the result of the base; the arguments are PEFT's."""
    weight = dequantized(base_layer)
    rows_OI = weight.T if module.fan_in_fan_out else weight
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):  # the paper's section 4.3
        exact = torch.promote_types(rows_OI.dtype, torch.float32)
        a_RI, b_OR = lora_A.weight.to(exact), lora_B.weight.to(exact)
        length_O = lengths(torch.addmm(rows_OI.to(exact), b_OR, a_RI, alpha=scaling))
    # in the type of the magnitudes, which sharding may round: at first both are the same
    scale_O = module.weight / length_O.to(module.weight.dtype)
    if base_result is None:
        base_result = F.linear(x, rows_OI.to(x.dtype))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    update = lora_B(lora_A(x)) * scaling
    found: torch.Tensor = (scale_O - 1) * base_result + scale_O * update
    return found
