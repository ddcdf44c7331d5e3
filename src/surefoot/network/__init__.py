"""Networks: models that are loaded, adapted, sharded, and run to the outputs that a stage needs.

``StackedWeights`` is imported on first use: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .adapters import StackedWeights

__all__ = ["StackedWeights"]

__getattr__ = lazy_getattr(__name__, {".adapters": ("StackedWeights",)})
