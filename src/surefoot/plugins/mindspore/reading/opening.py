"""Open a folder of MindSpore's weights in any of their forms, as boxes of tensors in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ....checkpoint.disk import strict_json, tensorfile
from ....checkpoint.layouts.dcp import DcpChunk
from ....checkpoint.layouts.layout import SavedFolder
from ....errors import CheckpointError
from ....storage import files
from ..strategy.parallel_config import MOMENTS
from ..strategy.shapes import Shapes
from . import full, iteration
from .consistency import recorded_step
from .distributed import open_distributed
from .ranks import file_at, rank_files, rank_folders, root_of, step_of, steps

Form = Literal["iteration", "ranks", "full"]
META = "meta.json"  # of a rank: the last step it saved
_STATE = {
    *("epoch_num", "step_num", "global_batch_size", "loss_scale", "learning_rate", "global_step"),
    *("scale_sense", "current_iterator_step", "last_overflow_iterator_step"),
}


def form_of(path: Path) -> Form | None:
    """The form of MindSpore's weights in ``path``; None if there are none."""
    if iteration.recognise(path):
        return "iteration"
    is_rank_file = step_of(path.name) is not None and files.size_of(path) is not None
    if is_rank_file or rank_folders(root_of(path)):
        return "ranks"
    return "full" if full.recognise(path) else None


def open_boxes(
    path: Path, *, strategy: Path | None = None, shapes: Shapes | None = None
) -> dict[str, list[DcpChunk]]:
    """Every tensor by name: weights, moments, numbers; ``strategy`` and ``shapes`` of ranks."""
    form = form_of(path)
    if form == "ranks":
        return open_distributed(path, strategy=strategy, shapes=shapes)
    if strategy is not None:
        raise CheckpointError(f"{path}: no ranks' slices, so a strategy cannot be used with it")
    return iteration.open_iteration(path) if form == "iteration" else full.open_full(path)


def role_of(name: str, shape: tuple[int, ...]) -> str:
    """model, optimizer or state."""
    if name.startswith(MOMENTS):
        return "optimizer"
    is_number = not shape and "." not in name  # of the training: modules have paths
    return "state" if is_number or name in _STATE else "model"


def saves(root: Path) -> list[SavedFolder]:
    """The saves in ``root``, oldest first. Raises ``CheckpointError``."""
    if form_of(root) == "iteration":
        paths = iteration.iterations(root) or [root]
        return [SavedFolder(path, iteration.number_of(path), _size(path)) for path in paths]
    if form_of(root) != "ranks":
        return [SavedFolder(root, None, _size(root))]
    folders = rank_folders(root_of(root)).values()
    found = []
    for step in steps(root_of(root)):
        own = [file_at(folder, step) for folder in folders]
        with tensorfile.open_path(own[0]) as file:
            number = recorded_step(file)
        found.append(SavedFolder(own[0], number, sum(files.size_of(path) or 0 for path in own)))
    return found


def _size(folder: Path) -> int:
    return sum(files.size_of(folder / name) or 0 for name in files.list_folder(folder))


def progress_of(path: Path) -> Mapping[str, Any]:
    """The training progress in the folder, as JSON."""
    form = form_of(path)
    if form == "iteration":
        where = iteration.chosen(path) / iteration.COMMON
    elif form == "ranks":
        where = rank_files(path)[0].parent / META
    else:
        return {}
    if not files.exists(where):
        return {}
    return strict_json.read_object(where)
