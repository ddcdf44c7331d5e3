"""Products of trained linear layers in float8, through torchao; weights stay as they are.

Inputs, weights and gradients are scaled and rounded to 8 bits for each product (dynamic scaling, so
there is no state to save). A GPU of compute capability 8.9 or newer multiplies them at up to twice
the speed of bfloat16. Elsewhere the same rounding is emulated, slowly: to try how a run learns.

Each token has a scale of its own. torchao's recipe with one scale for a tensor is not offered:
there the examples of a packed row would change each other's rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from ...errors import ModelError, installation

logger = logging.getLogger(__name__)
MULTIPLE = 16  # of both sizes of a matrix, for the kernels
OLDEST = (8, 9)  # compute capability
_ROUTERS = {"gate", "router"}  # of experts: small, and what they decide is not continuous

Scaling = Literal["rowwise"]  # names of torchao's recipes


def use_float8(layers: Sequence[nn.Module], scaling: Scaling, *, emulate: bool) -> int:
    """Let the trained linear maps of decoder layers compute in float8; returns how many do.

    Raises ``ModelError`` if torchao is missing, or no linear map is suitable.
    """
    _must_be_installed()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # rows have any number of tokens, along which gradients of weights are sums
    config = Float8LinearConfig.from_recipe_name(scaling)
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    before = sum(_is_suitable(module, name) for name, module in _named(layers))
    if not before:
        raise ModelError(
            f"model.float8: no trained linear layer has sizes that are multiples of {MULTIPLE}; "
            "leave it unset"
        )
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_suitable)
    return before


def emulates(device: torch.device) -> bool:
    """Whether a CPU can only emulate float8. Raises ``ModelError`` for a GPU without it."""
    if device.type != "cuda":
        logger.warning("model.float8: a CPU emulates it, slower than without; for trials only")
        return True
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise ModelError(
            f"model.float8: {name} has compute capability {found[0]}.{found[1]}, expected at least "
            f"{OLDEST[0]}.{OLDEST[1]}; leave model.float8 unset"
        )
    return False


def _must_be_installed() -> None:
    if find_spec("torchao") is None:
        raise ModelError(
            f"model.float8 needs torchao, which is not installed: `{installation('torchao')}`"
        )


def _named(layers: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [pair for layer in layers for pair in layer.named_modules()]


def _is_suitable(module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    sizes = module.in_features, module.out_features
    return module.weight.requires_grad and not any(size % MULTIPLE for size in sizes)
