"""What a checkpoint is, for people and tools: read from manifests and headers, not from tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from .. import files
from ..errors import CheckpointError
from . import strict
from .commit import is_being_written, is_leftover, named, step_of
from .folder import CheckpointFolder, open_checkpoint
from .header import Entry
from .index import STATE, Piece
from .weights import ADAPTER_CONFIG, Weights, open_weights, recognise

_WIDTH = 60  # characters in which a state is told
TRAINER_STATE = "trainer_state.json"
_WANTED = {  # configuration file -> what is said of it
    "config.json": (
        "architectures",
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
    ),
    ADAPTER_CONFIG: ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules"),
}


@dataclass(frozen=True)
class Line:
    """One entry of a run's folder. ``problem`` is set if it cannot be used."""

    path: Path
    step: int | None = None
    created: str | None = None
    kind: str | None = None
    num_bytes: int | None = None
    loss: float | None = None
    is_best: bool = False
    is_being_written: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Tensor:
    """One tensor, as it is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str


@dataclass(frozen=True)
class Group:
    """The tensors of one role in figures."""

    role: str  # model, optimizer or state
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_elements(self) -> int:
        """Of all tensors: the number of parameters, for a model."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        return dict(Counter(tensor.dtype for tensor in self.tensors).most_common())


@dataclass(frozen=True)
class Summary:
    """A folder of weights: what it says about itself, and what is in it."""

    path: Path
    layout: str  # native, huggingface or peft
    facts: Mapping[str, str]  # in the order of interest
    files: Mapping[str, int]  # name -> bytes
    groups: tuple[Group, ...]
    states: Mapping[str, str]  # name -> what it holds, in a few words


def summarise(folder: Path) -> Summary:
    """Look into a folder of weights of any layout. Raises ``CheckpointError`` if it is none."""
    with files.raising(CheckpointError):
        if recognise(folder) == "native":
            return _summarise_native(open_checkpoint(folder))
        return _summarise_plain(open_weights(folder))


def list_run(root: Path) -> list[Line]:
    """The checkpoints under ``root``, oldest first, then what is left of others. Hashes nothing.

    A folder that is a checkpoint itself is a list of one.
    """
    with files.raising(CheckpointError):
        return _list_run(root)


def _list_run(root: Path) -> list[Line]:
    if step_of(root) >= 0 and recognise(root):
        return [_line(root)[0]]
    found = [_line(folder) for folder in named(root)]
    best = next((best for line, best in reversed(found) if line.problem is None), None)
    lines = [replace(line, is_best=line.step == best) for line, _ in found]
    names = files.list_folder(root)
    return lines + [_leftover(root / name) for name in names if is_leftover(name)]


def _line(folder: Path) -> tuple[Line, int | None]:
    """A checkpoint, and the step of the best one as far as it knows."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        problem = str(error).removeprefix(f"{folder}: ")
        return Line(folder, step_of(folder), problem=problem), None
    manifest, state = checkpoint.manifest, _trainer_state(checkpoint)
    line = Line(
        folder,
        step=manifest.step,
        created=manifest.created,
        kind=manifest.kind,
        num_bytes=sum(manifest.files.values()),
        loss=_last_loss(state),
        problem=_wrong_length(checkpoint),
    )
    best = state.get("best_global_step")
    return line, best if isinstance(best, int) else None


def _leftover(folder: Path) -> Line:
    if is_being_written(folder):
        return Line(folder, is_being_written=True)
    return Line(folder, problem="a save or removal cut short; removed when the run goes on")


def _wrong_length(checkpoint: CheckpointFolder) -> str | None:
    for name, expected in checkpoint.manifest.files.items():
        found = files.size_of(checkpoint.path / name)
        if found != expected:
            return f"{name}: {'missing' if found is None else f'{found} of {expected} bytes'}"
    return None


def _trainer_state(checkpoint: CheckpointFolder) -> Mapping[str, Any]:
    """The state for people; empty if it is missing or damaged, which is no reason to fail here."""
    if TRAINER_STATE not in checkpoint.manifest.files:
        return {}
    try:
        return strict.parse_object(checkpoint.small(TRAINER_STATE), TRAINER_STATE)
    except CheckpointError:
        return {}


def _last_loss(state: Mapping[str, Any]) -> float | None:
    history = state.get("log_history")
    rows = history if isinstance(history, list) else []
    losses = [row["loss"] for row in rows if isinstance(row, dict) and "loss" in row]
    return float(losses[-1]) if losses and isinstance(losses[-1], int | float) else None


def _summarise_native(checkpoint: CheckpointFolder) -> Summary:
    manifest = checkpoint.manifest
    facts = {
        "step": str(manifest.step),
        "kind": {"full": "full weights", "adapter": "adapter"}[manifest.kind],
        "saved": manifest.created,
        "parent": manifest.parent or "none",
        "world size": str(manifest.world_size),
        "versions": ", ".join(" ".join(pair) for pair in sorted(manifest.versions.items())),
    }
    skeleton = checkpoint.skeleton() if STATE in manifest.files else {}
    return Summary(
        checkpoint.path,
        "native",
        facts,
        manifest.files,
        _groups(manifest.pieces),
        {name: _in_words(value) for name, value in skeleton.items()},
    )


def _groups(pieces: Iterable[Piece]) -> tuple[Group, ...]:
    found: dict[str, list[Tensor]] = {}
    for piece in pieces:
        role, _, name = piece.tensor.partition("/")
        tensor = Tensor(name, piece.dtype, piece.shape, piece.num_bytes, piece.file)
        found.setdefault(role, []).append(tensor)
    return tuple(Group(role, tuple(found[role])) for role in sorted(found))


def _summarise_plain(weights: Weights) -> Summary:
    tensors = tuple(
        _tensor(name, place.entry, place.file.path.name)
        for name, place in sorted(weights.tensors.items())
    )
    folder = weights.folder
    sizes = {name: files.size_of(folder / name) for name in files.list_folder(folder)}
    return Summary(
        folder,
        weights.layout,
        _config_facts(folder),
        {name: size for name, size in sizes.items() if size is not None},
        (Group("model", tensors),),
        {},
    )


def _tensor(name: str, entry: Entry, file: str) -> Tensor:
    return Tensor(name, entry.dtype, entry.shape, entry.num_bytes, file)


def _config_facts(folder: Path) -> dict[str, str]:
    """A few words from ``config.json`` or ``adapter_config.json``."""
    facts: dict[str, str] = {}
    for name, keys in _WANTED.items():
        if files.exists(folder / name):
            with files.raising(CheckpointError), files.open_file(folder / name) as file:
                text = files.read_all(file, strict.MAX_BYTES)
            config = strict.parse_object(text, str(folder / name))
            facts |= {key: _plain(config[key]) for key in keys if config.get(key) is not None}
    return facts


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _in_words(value: object) -> str:
    """What a state holds: its keys, or its value if that is short."""
    if not isinstance(value, dict) or next(iter(value), "$").startswith("$"):
        text = str(value)
        return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
    lengths = accumulate(len(key) + 2 for key in value)
    shown = [key for key, length in zip(value, lengths, strict=True) if length <= _WIDTH]
    if not shown:
        return f"{len(value)} entries"
    rest = [f"… ({len(value)} entries)"] if len(shown) < len(value) else []
    return ", ".join(shown + rest)
