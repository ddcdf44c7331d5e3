"""Load states from a checkpoint: check all that can be checked, then read straight into place."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import CheckpointError
from .bytes import DTYPES, fill
from .folder import CheckpointFolder, open_checkpoint
from .index import Piece
from .states import Stateful
from .tensors import join, pointers, split

_SHOWN = 3  # names in a message; the counts tell the rest
_READERS = min(4, os.cpu_count() or 1)  # one core copies slower than the memory can


@dataclass(frozen=True)
class _Job:
    """One state to load: its pieces by tensor name, and where each is read to."""

    name: str
    pieces: Mapping[str, Piece]
    into: Mapping[str, torch.Tensor]
    skeleton: Any

    def tree(self, where: str) -> Any:
        return dict(self.into) if self.name == "model" else join(self.skeleton, self.into, where)


def load(
    folder: Path, states: Mapping[str, Stateful], *, only: Collection[str] | None = None
) -> None:
    """Make every state (of ``only``, if given) what it was when ``folder`` was saved.

    Tensors that a state already has, of the same shape and type, are read into directly. Nothing
    is changed before names, shapes, lengths and headers are known to be right; the hash of every
    piece is checked as it is read. Raises ``CheckpointError``.
    """
    if only is not None and (unknown := sorted(set(only) - set(states))):
        raise ValueError(f"only: no state {unknown[0]!r}; there are {', '.join(states)}")
    checkpoint = open_checkpoint(folder)
    wanted = {name: state for name, state in states.items() if only is None or name in only}
    skeleton = checkpoint.skeleton()
    with files.raising(CheckpointError, f"cannot load {folder}"):
        jobs = [_prepare(checkpoint, name, state, skeleton) for name, state in wanted.items()]
        _read(checkpoint, jobs)
    for job, state in zip(jobs, wanted.values(), strict=True):
        state.load_state_dict(job.tree(f"{folder}: {job.name}"))


def _prepare(
    checkpoint: CheckpointFolder, name: str, state: Stateful, skeleton: Mapping[str, Any]
) -> _Job:
    if name == "model":
        return _prepare_model(checkpoint, state)
    if name not in skeleton:
        held = ", ".join(sorted(skeleton))
        raise CheckpointError(f"{checkpoint.path}: it holds no state {name!r}, only {held}")
    is_optimizer = name == "optimizer"
    tree = state.state_dict() if is_optimizer else {name: state.state_dict()}
    current, _ = split(tree, name)
    saved = checkpoint.manifest.tensors("optimizer" if is_optimizer else "state")
    pieces = {}
    for pointer in pointers(skeleton[name]):
        if pointer not in saved:
            raise CheckpointError(
                f"{checkpoint.path}: {name}: tensor {pointer[:200]!r} is not there"
            )
        pieces[pointer] = saved[pointer]
    if is_optimizer:
        _check_shapes(checkpoint, name, current, pieces)
    return _Job(name, pieces, _targets(current, pieces), skeleton[name])


def _prepare_model(checkpoint: CheckpointFolder, state: Stateful) -> _Job:
    current, pieces = state.state_dict(), checkpoint.manifest.tensors("model")
    missing = [name for name in current if name not in pieces]
    unexpected = [name for name in pieces if name not in current]
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: it is the checkpoint of another model: of the {len(current)} "
            f"tensors of this one {_some(missing)} missing in it, and of its own {len(pieces)} "
            f"{_some(unexpected)} unknown here"
        )
    _check_shapes(checkpoint, "model", current, pieces)
    return _Job("model", pieces, _targets(current, pieces), None)


def _some(names: list[str]) -> str:
    if not names:
        return "none are"
    more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"


def _check_shapes(
    checkpoint: CheckpointFolder,
    name: str,
    current: Mapping[str, torch.Tensor],
    pieces: Mapping[str, Piece],
) -> None:
    odd = [n for n, p in pieces.items() if n in current and tuple(current[n].shape) != p.shape]
    if odd:
        first = odd[0]
        raise CheckpointError(
            f"{checkpoint.path}: it is the checkpoint of another model: {name} tensor {first} has "
            f"shape {list(pieces[first].shape)} in it, {list(current[first].shape)} here"
            + (f"; {len(odd)} tensors differ" if len(odd) > 1 else "")
        )


def _targets(
    current: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]
) -> dict[str, torch.Tensor]:
    """Where each piece is read to: the state's own tensor if it fits, otherwise a new one."""
    found = {}
    for name, piece in pieces.items():
        own = current.get(name)
        if own is None or not _fits(own, piece):
            own = torch.empty(piece.shape, dtype=DTYPES[piece.dtype])
        found[name] = own
    return found


def _fits(tensor: torch.Tensor, piece: Piece) -> bool:
    is_plain = (
        tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
    )
    same = tuple(tensor.shape) == piece.shape and tensor.dtype == DTYPES[piece.dtype]
    return is_plain and same and not (tensor.is_conj() or tensor.is_neg())


def _read(checkpoint: CheckpointFolder, jobs: Iterable[_Job]) -> None:
    """Open and check every file that is needed, then fill the tensors, several at a time."""
    todo = [(piece, job.into[name]) for job in jobs for name, piece in job.pieces.items()]
    with ExitStack() as stack, ThreadPoolExecutor(_READERS) as pool:
        opened = {
            name: stack.enter_context(checkpoint.tensors(name))
            for name in sorted({piece.file for piece, _ in todo})
        }

        def read(item: tuple[Piece, torch.Tensor]) -> None:
            piece, tensor = item
            checkpoint.check_piece(piece, fill(tensor, opened[piece.file], piece.key))

        for _ in pool.map(read, todo):
            pass
