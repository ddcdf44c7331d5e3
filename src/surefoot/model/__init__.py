"""A pretrained causal language model: opened from its files, changed, computed, and saved.

``section`` is what the recipe says. ``loading`` makes the model of a folder, in memory or on the
meta device, as ``config`` says; ``tokenizer`` and ``adapter_files`` open what is beside it, and
``base_identity`` records which files a run stands on. ``weight_matrices``, ``lora_targets``,
``adapters`` and ``expansion`` are what methods change. ``packed_attention``, ``isolation``,
``layers``, ``lora_layers`` and ``outputs`` compute it, with the head of ``chunked_cross_entropy``
and the kernels of ``packed_kernels`` and ``products``; ``weights`` are its tensors under the names
of its files.

Methods import this package, and its modules come on first use: a recipe is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from . import adapters, expansion, lora_layers, lora_targets, weight_matrices, weights

__all__ = ["adapters", "expansion", "lora_layers", "lora_targets", "weight_matrices", "weights"]


def __getattr__(name: str) -> "ModuleType":
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
