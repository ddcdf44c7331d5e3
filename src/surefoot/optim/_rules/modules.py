"""The modules of this package, each imported on first use: all need torch, and a recipe is read
without it."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import few_bits, orthogonalization, projection, rule_optimizer

__all__ = ["few_bits", "orthogonalization", "projection", "rule_optimizer"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __package__)
