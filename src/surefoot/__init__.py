"""Surefoot: fine-tune large language models from one YAML file, where no step is ever lost."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run.training_run import train

__all__ = ["__version__", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``surefoot.train``, imported on first use: torch takes seconds."""
    if name == "train":
        from .run.training_run import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
