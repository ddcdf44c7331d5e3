"""Open a folder of MindSpore's weights in any of their forms, as boxes of tensors in files.

Of weights of which every rank saved its slice, the strategy files say which box each rank has;
without these, ``slicing`` finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...checkpoint.disk import strict_json, tensorfile
from ...checkpoint.disk.folder import FolderWeights, TensorLocation
from ...checkpoint.layouts.layout import (
    DcpChunk,
    Layout,
    Locations,
    Reading,
    SavedFolder,
    locations,
)
from ...checkpoint.layouts.reading import options_of
from ...checkpoint.state.roles import MODEL
from ...errors import CheckpointError, counted
from ...parallel.sharding import Box, is_covered_once
from ...storage import files
from . import iteration
from .iteration import whole
from .ranks import (
    Slice,
    check_fit,
    check_same,
    check_step,
    file_at,
    model_near,
    old_file,
    rank_files,
    rank_folders,
    recorded_step,
    root_of,
    step_of,
    steps,
)
from .reading import ReadingOptions
from .slicing import UNKNOWN, Slicing, find_strategy
from .strategy import Strategy, open_strategy, strategy_near
from .tensor_layout import MOMENTS

Form = Literal["iteration", "ranks", "full"]
Boxes = dict[str, list[DcpChunk]]  # by a tensor's name; together they are all of it
META = "meta.json"  # of a rank: the last step it saved
_STATE = {
    *("epoch_num", "step_num", "global_batch_size", "loss_scale", "learning_rate", "global_step"),
    *("scale_sense", "current_iterator_step", "last_overflow_iterator_step"),
}
_RANKS = 6  # told of in an error
_INT4 = "Int4"


@dataclass(frozen=True)
class MindSpore(Layout):
    """A folder of MindSpore, under MindSpore's names."""

    name = "mindspore"
    title = "MindSpore"
    written_by = "MindSpore"
    is_assembled = True
    pickle_suffixes = ()  # its .ckpt are protocol buffers

    options: ReadingOptions = ReadingOptions()

    def read_as(self, reading: Reading) -> MindSpore:
        """By the strategy, the sharding and the names that a user states."""
        return replace(self, options=options_of(ReadingOptions, reading))

    def slicing(self, model: Path | None = None) -> Slicing:
        """What a user has stated of the slices, and where the ``model`` of this shape is."""
        options = self.options
        config = options.source_parallel_config
        return Slicing(options.strategy, config, model, options.names)

    def recognise(self, folder: Path) -> bool:
        """Whether it has files of MindSpore."""
        return form_of(folder) is not None

    def open(self, folder: Path) -> FolderWeights:
        """The weights, each joined from its ranks' slices, without the state of the training."""
        return open_mindspore_weights(folder, self.slicing())

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """Weights, moments and numbers of the training."""
        every = open_mindspore_state(folder, self.slicing())
        with_roles = {(role_of(n, p.entry.shape), n): p for n, p in every.items()}
        return {f"{r}/{n}": p for (r, n), p in with_roles.items() if roles is None or r in roles}

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
        """One folder contains all saves of a training, oldest first."""
        if form_of(folder) == "iteration":
            paths = iteration.iterations(folder) or [folder]
            return [SavedFolder(path, iteration.number_of(path), _size(path)) for path in paths]
        if form_of(folder) != "ranks":
            return [SavedFolder(folder, None, _size(folder))]
        ranks = rank_folders(root_of(folder)).values()
        saved = []
        for step in steps(root_of(folder)):
            paths = [file_at(rank, step) for rank in ranks]
            with tensorfile.open_path(paths[0]) as file:
                number = recorded_step(file)
            num_bytes = sum(files.size_of(path) or 0 for path in paths)
            saved.append(SavedFolder(paths[0], number, num_bytes))
        return saved


LAYOUT = MindSpore()


def form_of(path: Path) -> Form | None:
    """The form of MindSpore's weights in ``path``; None if there are none."""
    if iteration.is_iteration(path):
        return "iteration"
    is_rank_file = step_of(path.name) is not None and files.size_of(path) is not None
    if is_rank_file or rank_folders(root_of(path)):
        return "ranks"
    return "full" if iteration.is_full(path) else None


def open_mindspore_weights(folder: Path, slicing: Slicing = UNKNOWN) -> FolderWeights:
    """The weights, each joined from its ranks' slices, without the state of the training."""
    with files.raising(CheckpointError):
        every = open_mindspore_state(folder, slicing)
    model = {n: p for n, p in every.items() if role_of(n, p.entry.shape) == MODEL}
    return FolderWeights(MindSpore.name, folder, model)


def open_mindspore_state(folder: Path, slicing: Slicing = UNKNOWN) -> dict[str, TensorLocation]:
    """Weights, moments and numbers of the training state, by MindSpore's names."""
    return locations(open_boxes(folder, slicing))


def open_boxes(path: Path, slicing: Slicing = UNKNOWN) -> Boxes:
    """Every tensor by name: weights, moments, numbers; ``slicing`` of ranks."""
    form = form_of(path)
    if form == "ranks":
        return open_distributed(path, slicing)
    return iteration.open_iteration(path) if form == "iteration" else iteration.open_full(path)


def open_distributed(path: Path, slicing: Slicing = UNKNOWN) -> Boxes:
    """The slices of every tensor in the files of one step. ``path`` is the folder that contains
    ``rank_0``, one above it, or a file of the step in it."""
    opened = [tensorfile.open_path(file) for file in rank_files(path)]
    for file in opened:
        packed = (name for name, kind in file.header.metadata.items() if kind == _INT4)
        if (name := next(packed, None)) is not None:
            raise CheckpointError(
                f"{file.path}: {name[:200]!r} contains two 4-bit integers in a byte, which is not "
                "supported"
            )
    check_step(opened)
    where = root_of(path)
    described = slicing.strategy or (None if slicing.config else strategy_near(where))
    if described is not None:
        layouts = open_strategy(described)
    elif len(opened) == 1:
        return {name: [whole(opened[0], name)] for name in opened[0].header.entries}
    else:
        slicing = replace(slicing, model=slicing.model or model_near(path))
        layouts = find_strategy(opened, slicing, where)
    if layouts.world_size != len(opened):
        stages = len(layouts.stages)
        parts = f"{stages} pipeline stages of " if stages > 1 else ""
        raise CheckpointError(
            f"{where}: the files of {counted(len(opened), 'rank')}, but {layouts.where} is about "
            f"{layouts.world_size} ({parts}{counted(layouts.num_devices, 'device')})"
        )
    slices, loose = _sort(opened, layouts)
    # Nothing in a rank's file says to which strategy it belongs, and that of another training would
    # make wrong tensors without a word. So the values decide (decisions/0032).
    check_fit(slices, layouts.where)
    boxes = {name: _joined(name, of_ranks, where) for name, of_ranks in slices.items()}
    for name, replicas in loose.items():
        first = replicas[0].stored
        if first.shape:  # a number differs by stage where it counts what a stage does
            check_same(name, [(replica.rank, replica.stored.file) for replica in replicas])
        boxes[name] = [first]
    return boxes


def _sort(
    opened: Sequence[tensorfile.TensorFile], strategy: Strategy
) -> tuple[dict[str, list[Slice]], dict[str, list[Slice]]]:
    """The tensors of the strategy, by name, and the others, which are replicated."""
    slices: dict[str, list[Slice]] = {}
    loose: dict[str, list[Slice]] = {}
    for rank, file in enumerate(opened):
        layouts, device = strategy.of_rank(rank)
        for name, entry in file.header.entries.items():
            if name not in layouts:
                loose.setdefault(name, []).append(Slice(rank, whole(file, name)))
                continue
            layout = layouts[name]
            try:
                shape = layout.whole(entry.shape)
                box = layout.box(shape, device)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{strategy.where}: does not fit {file.path}: {name[:200]!r} of shape "
                    f"{list(entry.shape)}: {error}"
                ) from None
            slices.setdefault(name, []).append(Slice(rank, DcpChunk(file, shape, box)))
    return slices, loose


def _joined(name: str, slices: Sequence[Slice], where: Path) -> list[DcpChunk]:
    """The slices of one tensor, of equal ones the first, after a check that they cover it."""
    first = slices[0].stored
    kinds = {(part.stored.shape, part.stored.file.entry(name).dtype) for part in slices}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{where}: {name[:200]!r} has another type or shape in other ranks' files"
        )
    # of replicas the first: later pairs of a dict replace earlier ones
    chunk_at = {part.stored.box: part.stored for part in reversed(slices)}
    boxes = sorted(chunk_at)
    if not is_covered_once(Box.whole(first.shape), boxes):
        ranks = ", ".join(str(part.rank) for part in slices[:_RANKS])
        raise CheckpointError(
            f"{where}: of {name[:200]!r} only slices of rank {ranks} exist, which do not cover "
            f"the shape {list(first.shape)}"
        )
    return [chunk_at[box] for box in boxes]


def role_of(name: str, shape: tuple[int, ...]) -> str:
    """model, optimizer or state."""
    if name.startswith(MOMENTS):
        return "optimizer"
    is_number = not shape and "." not in name  # of the training: modules have paths
    return "state" if is_number or name in _STATE else "model"


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
