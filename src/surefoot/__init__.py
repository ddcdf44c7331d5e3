"""Surefoot: fine-tune large language models from one YAML file, where no step is ever lost."""

from typing import TYPE_CHECKING

from .lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .run.from_python.outcome import Outcome
    from .run.from_python.stages import StageParts
    from .run.training_run import train

__all__ = ["Outcome", "StageParts", "__version__", "train"]
__version__ = "0.1.0"

# torch takes seconds to import
_HOMES = {
    ".run.training_run": ("train",),
    ".run.from_python.outcome": ("Outcome",),
    ".run.from_python.stages": ("StageParts",),
}
__getattr__ = lazy_getattr(__name__, _HOMES)
