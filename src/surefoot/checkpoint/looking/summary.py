"""What a checkpoint contains, for people and tools: from manifests and headers, without torch.

Of two trees of plain data, ``differences`` tells every path that differs, with both values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError, counted
from ...storage import files
from ..disk import strict_json
from ..disk.folder import (
    ADAPTER_CONFIG,
    TRAINER_STATE,
    CheckpointFolder,
    FolderWeights,
    TrainerStateFile,
    load_trainer_state,
    open_checkpoint,
)
from ..layouts import LAYOUTS
from ..layouts.detection import has_manifest, open_contents, states_of
from ..layouts.layout import AS_STORED, Native, Reading

What = Literal["differs", "only in A", "only in B"]
PARTS = ("model", "optimizer", "state", "config", "recipe", "versions")  # of a checkpoint
_MANY = 16  # a longer list of plain values is one value
_WIDTH = 60  # characters in which a state is told
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
class Tensor:
    """One tensor, as it is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str


@dataclass(frozen=True)
class Group:
    """Counts of the tensors of one role."""

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
        """Number of tensors of each dtype."""
        return dict(Counter(tensor.dtype for tensor in self.tensors).most_common())


@dataclass(frozen=True)
class Summary:
    """A folder of weights: its description of itself, and its contents."""

    path: Path
    layout: str  # native, huggingface, peft, dcp or mindspore
    facts: Mapping[str, str]  # in the order of interest
    files: Mapping[str, int]  # name -> bytes
    groups: tuple[Group, ...]
    states: Mapping[str, str]  # name -> what it holds, in a few words

    @property
    def pickles(self) -> list[str]:
        """The files that could execute code if they were read, and are therefore not read."""
        return [n for n in self.files if n.endswith(LAYOUTS[self.layout].pickle_suffixes)]


def summarise(folder: Path, reading: Reading = AS_STORED) -> Summary:
    """Summarize a folder of weights of any layout. Raises ``CheckpointError`` if it is none."""
    with files.raising(CheckpointError):
        if has_manifest(folder):
            return _summarise_native(open_checkpoint(folder))
        return _summarise_plain(open_contents(folder, reading=reading))


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
    tensors = {}
    rules = manifest.grid.rule_of if manifest.grid else {}
    for name, pieces in manifest.by_tensor().items():
        # Of a rule, the pieces would be millions, and their files those of all ranks.
        where = "rank_*" if name in rules else _several(sorted({p.file for p in pieces}))
        tensors[name] = Tensor(name, pieces.dtype, pieces.shape, pieces.num_bytes, where)
    groups, states = _groups(tensors), _states(checkpoint.path)
    return Summary(checkpoint.path, Native.name, facts, manifest.files, groups, states)


def _states(folder: Path) -> dict[str, str]:
    return {name: _in_words(value) for name, value in states_of(folder).items()}


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _groups(tensors: Mapping[str, Tensor]) -> tuple[Group, ...]:
    """Tensors by role, from their full names."""
    by_role: dict[str, list[Tensor]] = {}
    for full_name, tensor in sorted(tensors.items()):
        role, _, name = full_name.partition("/")
        by_role.setdefault(role, []).append(replace(tensor, name=name))
    return tuple(Group(role, tuple(by_role[role])) for role in sorted(by_role))


def _summarise_plain(contents: FolderWeights) -> Summary:
    folder, tensors = contents.folder, {}
    for name, place in contents.tensors.items():
        paths = sorted({part.file.path for part in place.parts}) or [place.file.path]
        file, entry = _several([_inside(path, folder) for path in paths]), place.entry
        tensors[name] = Tensor(name, entry.dtype, entry.shape, entry.num_bytes, file)
    try:
        progress, states = _progress(folder), _states(folder)
    except CheckpointError as error:  # a damaged log says nothing against the weights
        progress, states = {"log": f"cannot be read: {error}"}, {}
    groups, facts = _groups(tensors) or (Group("model", ()),), progress | _config_facts(folder)
    return Summary(folder, contents.layout, facts, _sizes(contents), groups, states)


def _sizes(contents: FolderWeights) -> dict[str, int]:
    """The files in the folder, and the tensor files in subfolders."""
    folder = contents.folder
    sizes = {name: files.size_of(folder / name) for name in files.names_in(folder)}
    for place in contents.tensors.values():
        for file in {part.file for part in place.parts} or {place.file}:
            sizes[_inside(file.path, folder)] = file.header.file_size
    return {name: size for name, size in sorted(sizes.items()) if size is not None}


def _inside(path: Path, folder: Path) -> str:
    """A file's name relative to the folder."""
    return str(path.relative_to(folder)) if folder in path.parents else path.name


def _progress(folder: Path) -> dict[str, str]:
    """The progress of the run, according to the Hugging Face Trainer."""
    if not files.exists(folder / TRAINER_STATE):
        return {}
    state = TrainerStateFile.of(load_trainer_state(folder))
    progress = {"step": state.step, "loss": state.last("loss"), "best step": state.best_step}
    return {name: str(value) for name, value in progress.items() if value is not None}


def _config_facts(folder: Path) -> dict[str, str]:
    """A short description from ``config.json`` or ``adapter_config.json``."""
    facts: dict[str, str] = {}
    for name, keys in _WANTED.items():
        if files.exists(folder / name):
            with files.raising(CheckpointError):
                config = strict_json.read_object(folder / name)
            settings = {key: config[key] for key in keys if config.get(key) is not None}
            for key, value in settings.items():
                every = value if isinstance(value, list) else [value]
                facts[key] = _clipped(", ".join(map(str, every)))
    return facts


def _in_words(value: object) -> str:
    """A short description of a state: its keys, or its value if that is short."""
    if not isinstance(value, dict) or next(iter(value), "$").startswith("$"):
        return _clipped(str(value))
    lengths = accumulate(len(key) + 2 for key in value)
    shown = [key for key, length in zip(value, lengths, strict=True) if length <= _WIDTH]
    every = counted(len(value), "entry", "entries")
    if not shown:
        return every
    rest = [f"… ({every})"] if len(shown) < len(value) else []
    return ", ".join(shown + rest)


def _clipped(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


@dataclass(frozen=True)
class ValueChange:
    """One value that differs. For lists of different lengths, their lengths."""

    path: str
    what: What
    a: object = None
    b: object = None


def differences(a: object, b: object, path: str = "") -> list[ValueChange]:
    """All differences of two trees of dicts, lists and plain values, in the order of ``a``."""
    return list(_differences(a, b, path))


def _differences(a: object, b: object, path: str) -> Iterator[ValueChange]:
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _of_dicts(a, b, path)
    elif isinstance(a, list) and isinstance(b, list):
        yield from _of_lists(a, b, path)
    elif not _is_same(a, b):
        yield ValueChange(path, "differs", a, b)


def _of_dicts(
    a: Mapping[object, object], b: Mapping[object, object], path: str
) -> Iterator[ValueChange]:
    for key in [*a, *(key for key in b if key not in a)]:
        key_path = f"{path}.{key}" if path else str(key)
        if key not in b:
            yield ValueChange(key_path, "only in A", a=a[key])
        elif key not in a:
            yield ValueChange(key_path, "only in B", b=b[key])
        else:
            yield from _differences(a[key], b[key], key_path)


def _of_lists(a: list[object], b: list[object], path: str) -> Iterator[ValueChange]:
    if len(a) != len(b):
        yield ValueChange(path, "differs", counted(len(a), "item"), counted(len(b), "item"))
    elif len(a) > _MANY and not any(isinstance(item, dict | list) for item in a + b):
        if not all(map(_is_same, a, b)):  # a random generator's numbers, say
            yield ValueChange(path, "differs", a, b)
    else:
        for i, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            yield from _differences(item_a, item_b, f"{path}[{i}]")


def _is_same(a: object, b: object) -> bool:
    """``==``, but True is not 1, and nan is itself."""
    if (a != a) and (b != b):  # noqa: PLR0124
        return True
    return a == b and isinstance(a, bool) == isinstance(b, bool)
