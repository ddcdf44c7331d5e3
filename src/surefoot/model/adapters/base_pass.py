"""A pass through the base under an adapter, which is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """While it lasts, ``module``, which PEFT has wrapped, computes what its base does. PEFT makes
    every factor trainable when it enables its layers again; here each is as it was before."""
    tuner: Any = module.base_model
    before = {name: (p, p.requires_grad) for name, p in module.named_parameters()}
    tuner.disable_adapter_layers()
    try:
        yield
    finally:
        tuner.enable_adapter_layers()
        for name, parameter in module.named_parameters():
            held, is_trained = before[name]
            held.requires_grad_(is_trained)
            if parameter is not held:  # gathered meanwhile
                parameter.requires_grad_(is_trained)
