"""Load states from a checkpoint: check all that can be checked, then read directly into place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import add, sub
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, counted
from ..parallel.sharding import Box
from ..storage import files
from ..storage.cgroups import usable_cores
from ..storage.memory import only_new_collected
from ..storage.parallel_work import in_parallel
from .disk._bytes import DTYPES, fill, new_tensor, read_box
from .disk.folder import CheckpointFolder, open_checkpoint
from .disk.manifest import Piece, Pieces
from .disk.tensorfile import TensorFile
from .state.roles import STATE, FileRole, ShardedState, Stateful
from .state.states import LocalBox, UnshardedState, adopted, join, local_box_of, pointers, split

_SHOWN = 3  # names in a message; the counts tell the rest
_READERS = min(4, usable_cores())  # one core copies slower than the memory can


@dataclass(frozen=True)
class _Job:
    """One state to load: its pieces by tensor name, its current tensors, and its structure."""

    name: str
    pieces: Mapping[str, Pieces]
    current: Mapping[str, torch.Tensor]
    skeleton: Any
    state: ShardedState
    is_flat: bool = False  # weights, which need no skeleton

    @property
    def to_read(self) -> dict[str, Pieces]:
        """What to read: without the tensors of other pipeline stages."""
        elsewhere = {name for name, tensor in self.current.items() if tensor.is_meta}
        return {name: pieces for name, pieces in self.pieces.items() if name not in elsewhere}

    def tree(self, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
        if self.is_flat:
            return {name: tensors[name] for name in self.current}
        return join(self.skeleton, tensors, where)


@only_new_collected()
def load(
    folder: Path | str,
    states: Mapping[str, Stateful],
    *,
    only: Collection[str] | None = None,
    is_verified: bool = False,
) -> None:
    """Restore every state (of ``only``, if given) from ``folder``.

    Existing tensors of the same shape and dtype are read into directly. Names, shapes, lengths and
    headers are checked before anything is changed; the hash of every piece is checked as it is
    read. A piece of which this rank needs only a part is read in full for its hash, unless the
    caller has just verified the folder (``is_verified``). Raises ``CheckpointError``.
    """
    if only is not None and (unknown := sorted(set(only) - set(states))):
        raise ValueError(f"only: no state {unknown[0]!r}; there are {', '.join(states)}")
    checkpoint = open_checkpoint(Path(folder))
    with files.raising(CheckpointError, f"cannot load {folder}"):
        jobs = _jobs(checkpoint, states, only)
        tensors = _read(checkpoint, jobs, is_verified=is_verified)
        trees = [
            job.tree(into, f"{folder}: {job.name}") for job, into in zip(jobs, tensors, strict=True)
        ]
    for job, tree in zip(jobs, trees, strict=True):
        job.state.load_state_dict(tree)


def needed(
    checkpoint: CheckpointFolder,
    states: Mapping[str, Stateful],
    *,
    only: Collection[str] | None = None,
) -> list[tuple[Piece, Box]]:
    """The pieces of which ``load`` would read something on this rank, and which box of the tensor
    that is. Raises ``CheckpointError`` as it does."""
    with files.raising(CheckpointError, f"cannot load {checkpoint.path}"):
        jobs = _jobs(checkpoint, states, only)
        return [
            (piece, piece.box & _local(jobs[number], name, jobs[number].pieces[name]) or piece.box)
            for number, piece, name in _wanted(jobs)
        ]


def _jobs(
    checkpoint: CheckpointFolder, states: Mapping[str, Stateful], only: Collection[str] | None
) -> list[_Job]:
    with_files, rest = adopted({n: states[n] for n in states if only is None or n in only})
    skeleton = checkpoint.skeleton()
    everything = with_files | {n: UnshardedState(s) for n, s in rest.items()}
    return [
        _job_of(checkpoint, name, state, skeleton, has_files=name in with_files)
        for name, state in everything.items()
    ]


def _job_of(
    checkpoint: CheckpointFolder,
    name: str,
    state: ShardedState,
    skeleton: Mapping[str, Any],
    *,
    has_files: bool,
) -> _Job:
    """A state with files of its own, or one that shares its file with others."""
    if has_files and FileRole(name).is_weights:
        return _weights_job(checkpoint, name, state)
    if name not in skeleton:
        available = ", ".join(sorted(skeleton))
        raise CheckpointError(f"{checkpoint.path}: it contains no state {name!r}, only {available}")
    saved = checkpoint.manifest.tensors(name if has_files else STATE)
    names = pointers(skeleton[name])
    if missing := [pointer for pointer in names if pointer not in saved]:
        raise CheckpointError(f"{checkpoint.path}: {name}: tensor {missing[0][:200]!r} is missing")
    pieces = {pointer: saved[pointer] for pointer in names}
    tree = state.state_dict() if has_files else {name: state.state_dict()}
    current, _ = split(tree, name)
    for pointer in pieces.keys() - current.keys():
        if (tensor := state.like(pointer)) is not None:
            current[pointer] = tensor
    if has_files:
        _check_shapes(checkpoint, name, current, pieces)
    return _Job(name, pieces, current, skeleton[name], state)


def _weights_job(checkpoint: CheckpointFolder, role: str, state: ShardedState) -> _Job:
    current, pieces = state.state_dict(), checkpoint.manifest.tensors(role)
    missing = [name for name in current if name not in pieces]
    unexpected = [name for name in pieces if name not in current]
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: a checkpoint of another {role}, with "
            f"{counted(len(pieces), 'tensor')} where this run has {len(current):,}: "
            f"missing in it: {_some(missing)}; unknown to this run: {_some(unexpected)}"
        )
    _check_shapes(checkpoint, role, current, pieces)
    return _Job(role, pieces, current, None, state, is_flat=True)


def _some(names: list[str]) -> str:
    more = f", … ({len(names):,} in total)" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN]) or 'none'}{more}"


def _check_shapes(
    checkpoint: CheckpointFolder,
    name: str,
    current: Mapping[str, torch.Tensor],
    pieces: Mapping[str, Pieces],
) -> None:
    shapes = {name: parts.shape for name, parts in pieces.items()}
    here = {n: t for n, t in current.items() if not t.is_meta}  # others check what they have
    odd = [n for n, shape in shapes.items() if n in here and tuple(here[n].shape) != shape]
    if odd:
        first = odd[0]
        raise CheckpointError(
            f"{checkpoint.path}: a checkpoint of another model: {name} tensor {first} has "
            f"shape {list(shapes[first])} in it, {list(current[first].shape)} here"
            + (f"; {len(odd)} tensors differ" if len(odd) > 1 else "")
        )


def _read(
    checkpoint: CheckpointFolder, jobs: Sequence[_Job], *, is_verified: bool
) -> list[dict[str, torch.Tensor]]:
    """Open and check every file that is needed, then fill the tensors, several at a time."""
    wanted = sorted(_wanted(jobs), key=lambda part: part[1].num_bytes, reverse=True)
    names = sorted({piece.file for _, piece, _ in wanted})
    with ExitStack() as stack:
        opened = {name: stack.enter_context(checkpoint.tensors(name)) for name in names}
        targets = [_targets(job.current, job.pieces) for job in jobs]  # no memory before the checks

        def read(part: tuple[int, Piece, str]) -> None:
            number, piece, name = part
            into = local_box_of(name, targets[number][name], jobs[number].state.cuts_of(name))
            is_checked = _read_piece(checkpoint, piece, opened[piece.file], into)
            if not (is_checked or is_verified):
                checkpoint.check_stored(opened[piece.file], piece, piece.box & into.box)

        in_parallel(read, wanted, _READERS)
    return targets


def _wanted(jobs: Sequence[_Job]) -> Iterator[tuple[int, Piece, str]]:
    """What this rank reads: the number of a job, and a piece of a tensor of this name."""
    for number, job in enumerate(jobs):
        for name, pieces in job.to_read.items():
            for piece in pieces.near(_local(job, name, pieces)):
                yield number, piece, name


def _local(job: _Job, name: str, pieces: Pieces) -> Box:
    """What this rank reads of a tensor."""
    tensor = job.current.get(name)
    if isinstance(tensor, DTensor) and tuple(tensor.shape) == pieces.shape:
        return local_box_of(name, tensor, job.state.cuts_of(name)).box
    return Box.whole(pieces.shape)


def _read_piece(
    checkpoint: CheckpointFolder, piece: Piece, file: TensorFile, into: LocalBox
) -> bool:
    """Read what the wanted box has of ``piece``; a piece that is read completely is checked.
    Returns whether no byte was used that is not."""
    common = piece.box & into.box
    if piece.box.size and common is None:
        return True
    stored = piece.inside(file.entry(piece.key).shape)
    if common is not None and common != piece.box:
        shift = map(sub, stored.start, piece.box.start)
        inside = Box(tuple(map(add, common.start, shift)), common.shape)
        into.values[common.slices_in(into.box)].copy_(read_box(file, piece.key, inside))
        return False
    target = into.values[piece.box.slices_in(into.box)] if piece.box.size else into.values
    if target.is_contiguous() and target.device.type == "cpu":
        digest = fill(target, file, piece.key, stored)
    else:
        values = torch.empty(piece.box.shape, dtype=target.dtype)
        digest = fill(values, file, piece.key, stored)
        target.copy_(values)
    checkpoint.check_piece(piece, digest)
    return True


def _targets(
    current: Mapping[str, torch.Tensor], pieces: Mapping[str, Pieces]
) -> dict[str, torch.Tensor]:
    """The destination of each tensor: the state's own tensor if it fits, otherwise a new one."""
    targets = {}
    for name, stored in pieces.items():
        tensor = current.get(name)
        if isinstance(tensor, DTensor) and tensor.dtype != DTYPES[stored.dtype]:
            tensor = torch.empty_like(tensor, dtype=DTYPES[stored.dtype])  # cut as it is, not whole
        fits = tensor is not None and _fits(tensor, stored)
        targets[name] = tensor if tensor is not None and fits else new_tensor(stored)
    return targets


def _fits(tensor: torch.Tensor, stored: Pieces) -> bool:
    if tensor.is_meta:
        return True
    if tuple(tensor.shape) != stored.shape or tensor.dtype != DTYPES[stored.dtype]:
        return False
    if isinstance(tensor, DTensor):
        return True
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
