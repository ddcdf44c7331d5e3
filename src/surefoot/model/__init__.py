"""A pretrained model: loading, packed attention, outputs, and its weights in files.

The names are imported on first use: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .adaptable import adapted, is_linear, parameters_inside
    from .adapters.dora import set_magnitudes
    from .adapters.frozen import add_start, has_frozen
    from .expansion.new_layers import insert_layers
    from .expansion.new_tokens import embeddings_to_train
    from .lora_targets import choose_targets, shorter_sides, target_patterns
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
        ".adaptable": ("adapted", "is_linear", "parameters_inside"),
        ".adapters.dora": ("set_magnitudes",),
        ".adapters.frozen": ("add_start", "has_frozen"),
        ".expansion.new_layers": ("insert_layers",),
        ".expansion.new_tokens": ("embeddings_to_train",),
        ".lora_targets": ("choose_targets", "shorter_sides", "target_patterns"),
        ".pretrained.weights": ("AdapterWeights", "FullWeights"),
        ".targets": ("decoder_layers",),
    },
)
