"""PEFT adapters: ``adapter_model.safetensors`` beside ``adapter_config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..disk import tensorfile
from ..sources.weights import ADAPTER, FolderWeights, tensors_in
from .huggingface import HuggingFace
from .layout import Layout
from .native import Native


@dataclass(frozen=True)
class PEFT(Layout):
    """A PEFT adapter."""

    name = "peft"
    title = "PEFT adapter"
    is_adapter = True
    has_adapter_config = True
    is_whole_model = True

    def recognise(self, folder: Path) -> bool:
        """Whether it has an adapter, and neither a model nor a manifest."""
        is_taken = any(other.recognise(folder) for other in (Native(), HuggingFace()))
        return files.exists(folder / ADAPTER) and not is_taken

    def open(self, folder: Path) -> FolderWeights:
        """The adapter's tensors under PEFT's names."""
        with files.raising(CheckpointError):
            file = tensorfile.open_path(folder / ADAPTER)
        return FolderWeights(self.name, folder, tensors_in([file]))
