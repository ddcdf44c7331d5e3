"""Folders whose weights are pickles: PyTorch's DCP, the Trainer with FSDP, and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

from ...checkpoint.layouts.detection import detect_layout, is_deepspeed
from ...checkpoint.sources.source import Renamed, TensorSource
from ...errors import CheckpointError
from ...storage import files
from ...storage.tensor_names import plain_names
from .dcp import FSDP, INDEX, open_pickled
from .deepspeed import open_deepspeed


def open_weights(folder: Path, *, trust_pickle: bool) -> TensorSource | None:
    """The weights in ``folder``; None if it is none of these. Raises ``CheckpointError``."""
    with files.raising(CheckpointError, f"cannot read {folder}"):
        for inner in (folder, folder / FSDP):
            if files.exists(inner / INDEX):
                return _unwrapped(open_pickled(inner, trust_pickle=trust_pickle))
        if detect_layout(folder) is None and is_deepspeed(folder):
            return _unwrapped(open_deepspeed(folder, trust_pickle=trust_pickle))
    return None


def _unwrapped(source: TensorSource) -> TensorSource:
    names = plain_names(source.shapes())
    return source if all(new == old for new, old in names.items()) else Renamed(source, names)
