"""Networks: models that are loaded, adapted, sharded, and run to the outputs that a stage needs.

``open`` makes a ``draft`` ready by a list of steps, whether its tensors are in memory or on the
meta device; ``shard_loading`` reads this rank's boxes of the files. ``method`` is what a method of
tuning says of itself, ``heads`` and ``_adapters`` what may be added, ``_parameter_names`` what all
of it is called in files. The result is a ``network``, run by an engine of ``runner``: whole, or
``_pipelined``. ``open.refuse_early`` raises, before anything is read, what opening it would raise.

``StackedWeights`` is imported on first use: a recipe is read without torch.
"""

from typing import TYPE_CHECKING

from ..extensions import lazy_getattr

if TYPE_CHECKING:
    from ._adapters import StackedWeights

__all__ = ["StackedWeights"]

__getattr__ = lazy_getattr(__name__, {"._adapters": ("StackedWeights",)})
