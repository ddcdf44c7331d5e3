"""The folders of MindSpore and MindSpore Transformers: full, by rank, or by iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.layouts.dcp import DCP, locations
from ...checkpoint.layouts.huggingface import PEFT, HuggingFace
from ...checkpoint.layouts.layout import Layout, Locations, SavedFolder
from ...checkpoint.layouts.native import Native
from ...checkpoint.sources.weights import FolderWeights, TensorLocation
from ...checkpoint.state.roles import MODEL
from ...errors import CheckpointError
from ...storage import files
from .opening import Shapes, form_of, open_boxes, progress_of, role_of, saves
from .ranks import model_near, old_file, step_of


def open_mindspore_state(
    folder: Path, *, strategy: Path | None = None, shapes: Shapes | None = None
) -> dict[str, TensorLocation]:
    """Weights, moments and numbers of the training state, by MindSpore's names."""
    return locations(open_boxes(folder, strategy=strategy, shapes=shapes))


@dataclass(frozen=True)
class MindSpore(Layout):
    """A folder of MindSpore, under MindSpore's names."""

    name = "mindspore"
    title = "MindSpore"
    written_by = "MindSpore"
    is_assembled = True
    pickle_suffixes = ()  # its .ckpt are protocol buffers

    def recognise(self, folder: Path) -> bool:
        """Whether it has files of MindSpore, and no other weights."""
        others: tuple[Layout, ...] = (Native(), PEFT(), HuggingFace(), DCP())
        return not any(o.recognise(folder) for o in others) and form_of(folder) is not None

    def open(self, folder: Path) -> FolderWeights:
        """The weights, each joined from its ranks' slices, without the state of the training."""
        with files.raising(CheckpointError):
            every = open_mindspore_state(folder)
        model = {n: p for n, p in every.items() if role_of(n, p.entry.shape) == MODEL}
        return FolderWeights(self.name, folder, model)

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """Weights, moments and numbers of the training."""
        found = open_mindspore_state(folder)
        named = {(role_of(n, p.entry.shape), n): p for n, p in found.items()}
        return {f"{r}/{n}": p for (r, n), p in named.items() if roles is None or r in roles}

    def states(self, folder: Path) -> Mapping[str, Any]:
        """How far the training was."""
        progress = progress_of(folder)
        return {"progress": progress} if progress else {}

    def why_not(self, folder: Path) -> str | None:
        """Its older format."""
        if (old := old_file(folder)) is None:
            return None
        return (
            f"{old}: MindSpore's older format, which is not supported; convert it with "
            "mindspore.ckpt_to_safetensors"
        )

    def names_save(self, path: Path) -> bool:
        """A file of ``rank_0`` names the step of all ranks."""
        return step_of(path.name) is not None

    def model_near(self, folder: Path) -> Path | None:
        """The folder itself, or one around its ranks."""
        return model_near(folder)

    def saves_in(self, folder: Path) -> Sequence[SavedFolder]:
        """One folder contains all saves of a training."""
        return saves(folder)


LAYOUT = MindSpore()
