"""Folders as transformers writes them: one ``model.safetensors``, or several files and an index;
and as PEFT does: ``adapter_model.safetensors`` beside ``adapter_config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..disk import strict_json, tensorfile
from ..disk.manifest import is_plain_name
from ..sources.weights import ADAPTER, MODEL, MODEL_INDEX, FolderWeights, TensorLocation, tensors_in
from .layout import Layout
from .native import Native


def has_model(folder: Path) -> bool:
    """Whether ``from_pretrained`` finds weights in it."""
    return any(files.exists(folder / name) for name in (MODEL, MODEL_INDEX))


def _open_shards(folder: Path) -> dict[str, TensorLocation]:
    where = folder / MODEL_INDEX
    index = strict_json.read_object(where)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{where}: weight_map must map tensor names to file names")
    for name in sorted(set(names.values())):
        if not is_plain_name(name) or "/" in name:
            raise CheckpointError(f"{where}: {name[:200]!r} is not a file in this folder")
    opened = {n: tensorfile.open_path(folder / n) for n in sorted(set(names.values()))}
    found = {}
    for tensor, name in names.items():
        entry = opened[name].header.entries.get(tensor)
        if entry is None:
            raise CheckpointError(
                f"{folder / name}: according to the index, {tensor[:200]!r} must be in this file"
            )
        found[tensor] = TensorLocation(opened[name], tensor, entry)
    return tensors_in(list(opened.values()), found)


@dataclass(frozen=True)
class HuggingFace(Layout):
    """A Hugging Face model."""

    name = "huggingface"
    title = "Hugging Face"
    is_whole_model = True

    def recognise(self, folder: Path) -> bool:
        """Whether it has ``model.safetensors`` or its index."""
        return has_model(folder) and not Native().recognise(folder)

    def open(self, folder: Path) -> FolderWeights:
        """The weights. Like in transformers, the single file wins over the index."""
        with files.raising(CheckpointError):
            if not files.exists(folder / MODEL):
                return FolderWeights(self.name, folder, _open_shards(folder))
            return FolderWeights(
                self.name, folder, tensors_in([tensorfile.open_path(folder / MODEL)])
            )


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
