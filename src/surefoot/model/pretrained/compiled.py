"""Compiled layers: each forward pass becomes a few fused kernels, forward and backward.

The function is compiled, not the module. So names of weights stay the same, and the hooks that
gather a sharded layer's weights run outside of it. So does activation checkpointing, which calls
the compiled function a second time. All layers of a kind share the compiled code, for any number of
rows and tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ...errors import RecipeError
from ..fused_lora import disable_fused_lora

Function = Callable[..., object]
# With and without gradients, with and without a mask, one row or one token, in each kind of layer.
_MAX_VARIANTS = 32


def compile_layers(layers: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Compile the forward passes of ``layers`` in place, each at its first use.

    Call it last: after adapters, activation checkpointing and sharding.

    Raises ``RecipeError`` if there is nothing to compile, or no compiler.
    """
    if not layers:
        raise RecipeError("model.compile: this model has no list of layers; set it to false")
    torch._dynamo.config.recompile_limit = max(_MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    options: dict[str, Any] | None = None
    if backend == "inductor":
        _must_have_compiler()
        options = {"fallback_random": True}  # so that dropout is that of plain layers

    @cache
    def compiled(function: Function) -> Function:
        made: Function = torch.compile(function, backend=backend, options=options, dynamic=True)
        return made

    for layer in layers:
        disable_fused_lora(layer)
        if getattr(layer, "gradient_checkpointing", False):
            _compile_inside(layer, compiled)
        else:
            layer.forward = compiled(layer.forward)


def _compile_inside(layer: nn.Module, compiled: Callable[[Function], Function]) -> None:
    """Compile inside activation checkpointing, whose graph break would leave nothing compiled."""
    recomputed: Function = layer._gradient_checkpointing_func  # type: ignore[assignment]

    def run(function: partial[object], *arguments: object) -> object:
        inner = partial(compiled(function.func), *function.args, **function.keywords)
        return recomputed(inner, *arguments)

    layer._gradient_checkpointing_func = run  # type: ignore[assignment]


def _must_have_compiler() -> None:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise RecipeError(
            f"model.compile: there is no C++ compiler {name!r} on this machine; install one "
            "(apt install g++), set the variable CXX to yours, or set model.compile to false"
        )
