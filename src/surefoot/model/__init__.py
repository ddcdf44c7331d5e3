"""A pretrained model: loading, packed attention, outputs, and its weights in files.

The names are imported on first use: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .adapters import add_start, has_frozen, set_magnitudes
    from .expansion import embeddings_to_train, insert_layers
    from .lora_targets import (
        adapted,
        choose_targets,
        is_linear,
        parameters_inside,
        shorter_sides,
        target_patterns,
    )
    from .pretrained.weights import AdapterWeights, FullWeights
    from .targets import decoder_layers

__all__ = [
    "AdapterWeights",
    "FullWeights",
    "adapted",
    "add_start",
    "choose_targets",
    "decoder_layers",
    "embeddings_to_train",
    "has_frozen",
    "insert_layers",
    "is_linear",
    "parameters_inside",
    "set_magnitudes",
    "shorter_sides",
    "target_patterns",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        ".adapters": ("add_start", "has_frozen", "set_magnitudes"),
        ".expansion": ("embeddings_to_train", "insert_layers"),
        ".lora_targets": (
            "adapted",
            "is_linear",
            "parameters_inside",
            "choose_targets",
            "shorter_sides",
            "target_patterns",
        ),
        ".pretrained.weights": ("AdapterWeights", "FullWeights"),
        ".targets": ("decoder_layers",),
    },
)
