"""PEFT adapters: ``adapter_model.safetensors`` beside ``adapter_config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...errors import CheckpointError
from ...storage import files
from ..disk import tensorfile
from ..sources.weights import ADAPTER, PICKLES, Weights, tensors_in
from .foreign import logged_states, model_of, read_small
from .huggingface import has_model
from .layout import Locations, SavedFolder
from .native import is_native


def is_peft(folder: Path) -> bool:
    """Whether it has an adapter, and neither a model nor a manifest."""
    is_taken = is_native(folder) or has_model(folder)
    return files.exists(folder / ADAPTER) and not is_taken


@dataclass(frozen=True)
class PEFT:
    """A PEFT adapter."""

    name: ClassVar[str] = "peft"
    title: ClassVar[str] = "PEFT adapter"
    has_manifest: ClassVar[bool] = False
    is_adapter: ClassVar[bool] = True
    has_adapter_config: ClassVar[bool] = True
    is_assembled: ClassVar[bool] = False
    is_whole_model: ClassVar[bool] = True
    pickle_suffixes: ClassVar[tuple[str, ...]] = PICKLES

    def recognise(self, folder: Path) -> bool:
        """Whether it has an adapter and no model."""
        return is_peft(folder)

    def open(self, folder: Path) -> Weights:
        """The adapter's tensors under PEFT's names."""
        with files.raising(CheckpointError):
            file = tensorfile.open_path(folder / ADAPTER)
        return Weights(self.name, folder, tensors_in([file]))

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """The model's; there is no other tensor."""
        return model_of(self.open(folder), roles)

    def states(self, folder: Path) -> Mapping[str, Any]:
        """The log of the Hugging Face Trainer, if there is one."""
        return logged_states(folder)

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """Any file of the folder."""
        return read_small(folder, name)

    def saves_in(self, folder: Path) -> Sequence[SavedFolder]:
        """None: every checkpoint has a folder of its own."""
        return ()
