"""Identity of the models that a run stands on and does not save: a base, a reference.

``base_models.json`` of a checkpoint has the hash of every file that is computed with, and the
commit of a hub model. All bytes of the weights are hashed, since the smallest change of them
changes what is trained. Loading reads the same files anyway, so it finds them in the page cache. A
file whose length, inode and times are the recorded ones is not read again: no write to it leaves
all of them as they were.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..storage import files
from ..storage.files import read_json
from ..storage.parallel_work import in_parallel
from .section import ModelSection

NAME = "base_models.json"
NEW_WEIGHTS = "new_weights.json"  # in a base that was initialized: from what, with which seed
TRAINED = "policy"  # the role of the model that a run trains
_READERS = 4
_LIMIT = 1 << 24  # bytes of the record
_CONFIGS = ("config.json", "adapter_config.json")
_UNIMPORTANT = ("transformers_version", "_name_or_path")  # of these, rewritten by every version
_MANIFEST = "manifest.json"  # of a Surefoot checkpoint: it has the hashes of all other files
_INDEX = "model.safetensors.index.json"
_ONE = ("model.safetensors", "adapter_model.safetensors")
_MANY = ("", "rank_*/", "checkpoint/rank_*/", "iteration_*/", "iteration_*/*/")  # of MindSpore
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SETTLED = 2.0  # seconds; younger times may stay equal in spite of a write, on coarse clocks


@dataclass(frozen=True)
class FileIdentity:
    """The hash of a file, and what the file system said of it."""

    hash: str
    size: int
    stamp: str  # inode and times; empty if they cannot be relied on


@dataclass(frozen=True)
class BaseModel:
    """One model of a run: what the recipe calls it, and its folder on this machine."""

    section: ModelSection
    folder: Path
    has_weights: bool = True  # False: the checkpoint has the weights, only the configuration counts
    adapter: Path | None = None
    has_adapter_weights: bool = False

    @property
    def commit(self) -> str | None:
        """The commit of a hub model, which names the folder of its download."""
        name = self.folder.name
        is_download = self.folder.parent.name == "snapshots" and _COMMIT.fullmatch(name)
        return name if is_download else None

    def paths(self) -> dict[str, Path]:
        """The files that are computed with, by their names in the record."""
        by_name = _files(self.folder, has_weights=self.has_weights)
        if self.section.trust_remote_code:
            by_name |= {path.name: path for path in self.folder.glob("*.py")}
        if self.adapter is not None:
            of_adapter = _files(self.adapter, has_weights=self.has_adapter_weights)
            by_name |= {f"adapter/{name}": path for name, path in of_adapter.items()}
        for number, folder in enumerate(self.section.frozen_adapters):
            of_adapter = _files(folder, has_weights=True)
            by_name |= {f"adapter/frozen_{number}/{n}": p for n, p in of_adapter.items()}
        return dict(sorted(by_name.items()))

    def at_commit(self) -> ModelSection:
        """The section, with the commit of a hub model as its revision."""
        return self.section if self.commit is None else replace(self.section, revision=self.commit)


@dataclass(frozen=True)
class ModelRecord:
    """What is recorded of one model."""

    path: str
    commit: str | None = None
    files: Mapping[str, FileIdentity] = field(default_factory=dict)


Record = Mapping[str, ModelRecord]  # by role


def _files(folder: Path, *, has_weights: bool) -> dict[str, Path]:
    configs = [folder / name for name in _CONFIGS if (folder / name).is_file()]
    weights = _weights(folder) if has_weights else ()
    return {str(path.relative_to(folder)): path for path in (*configs, *weights)}


def _weights(folder: Path) -> Iterator[Path]:
    """The weight files of a folder that are loaded; it may contain others."""
    if (folder / _MANIFEST).is_file():
        yield folder / _MANIFEST
        return
    if single := [folder / name for name in _ONE if (folder / name).is_file()]:
        yield from single
        return
    names = _indexed(folder / _INDEX)
    yield from (folder / name for name in names)
    if not names:
        yield from {path for place in _MANY for path in folder.glob(f"{place}*.safetensors")}


def _indexed(path: Path) -> list[str]:
    try:
        return sorted(set(read_json(path)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []


def is_new(folder: Path) -> bool:
    """Whether the model in ``folder`` was initialized for a run."""
    return (folder / NEW_WEIGHTS).is_file()


def identify(models: Mapping[str, BaseModel], known: Record) -> dict[str, ModelRecord]:
    """The identity of every model; files that are ``known`` and untouched are not read."""
    identities: dict[tuple[str, str], FileIdentity] = {}
    paths = {role: model.paths() for role, model in models.items()}
    todo = [(role, name, path) for role in paths for name, path in paths[role].items()]

    def read(item: tuple[str, str, Path]) -> None:
        role, name, path = item
        before = known[role].files.get(name) if role in known else None
        identities[role, name] = _identity(path, before)

    with files.raising(ModelError, "model"):
        in_parallel(read, todo, _READERS)
    return {
        role: ModelRecord(
            model.section.path, model.commit, {n: identities[role, n] for n in paths[role]}
        )
        for role, model in models.items()
    }


def _identity(path: Path, known: FileIdentity | None) -> FileIdentity:
    stat = path.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns
    stamp = f"{stat.st_dev}:{stat.st_ino}:{times[0]}:{times[1]}"
    # Hashing costs 0.3 s a GiB on a busy core, this 0.5 ms (docs/decisions/0043).
    if known is not None and known.stamp == stamp and known.size == stat.st_size:
        return known
    is_settled = time.time() - max(times) / 1e9 > _SETTLED
    return FileIdentity(_hash(path), stat.st_size, stamp if is_settled else "")


def _hash(path: Path) -> str:
    with files.open_file(path) as file:
        if path.name in _CONFIGS:
            return _hash_of_config(files.read_all(file, 1 << 26))
        return hash_of_bytes(file)


def hash_of_bytes(file: files.File) -> str:
    """The hash of all bytes of a file."""
    hashed, size = files.Hash(), file.size
    block = memoryview(bytearray(min(files.BLOCK, max(1, size))))
    for start in range(0, size, files.BLOCK):
        part = block[: min(files.BLOCK, size - start)]
        file.read_into(start, part)
        hashed.update(part)
    return hashed.hexdigest()


def _hash_of_config(data: bytes) -> str:
    """The hash of what a configuration says, however it is laid out."""
    try:
        content = files.parse_json(data)
    except ValueError:
        return files.digest(data)
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in _UNIMPORTANT}
    return files.digest(json.dumps(content, sort_keys=True).encode())


def changed(before: ModelRecord, now: ModelRecord) -> list[str]:
    """The files that are not what they were, with those that are new or missing."""
    old, new = (
        {name: identity.hash for name, identity in record.files.items()} for record in (before, now)
    )
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def changes_below(adapter: Path, base: Path) -> list[str]:
    """The files of ``base`` that are not those on which the ``adapter`` of a run was trained."""
    record = read(adapter).get(TRAINED)
    if record is None:
        return []
    now = identify({TRAINED: BaseModel(ModelSection(path=record.path), base)}, {TRAINED: record})
    names = [name for name in changed(record, now[TRAINED]) if name in record.files]
    return [name for name in names if not name.startswith("adapter/") and not name.endswith(".py")]


def pinned(section: ModelSection, known: ModelRecord | None) -> ModelSection:
    """A hub model at the recorded commit, wherever its branch has moved since."""
    if known is None or known.commit is None or known.path != section.path:
        return section
    if Path(section.path).exists() or (section.revision or "").startswith(known.commit[:7]):
        return section
    return replace(section, revision=known.commit)


def dump(record: Record) -> bytes:
    """``record`` as the file in a checkpoint."""
    content = {role: asdict(model_record) for role, model_record in record.items()}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def read(folder: Path) -> dict[str, ModelRecord]:
    """The record of a checkpoint; empty if it has none, or one that cannot be read."""
    try:
        with files.open_file(folder / NAME) as file:
            return parsed(files.read_all(file, _LIMIT))
    except (OSError, ValueError):
        return {}


def parsed(data: bytes) -> dict[str, ModelRecord]:
    """The record in the bytes of its file; empty if it cannot be read."""
    try:
        return {role: _parsed(fields) for role, fields in json.loads(data).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _parsed(fields: Mapping[str, Any]) -> ModelRecord:
    identities = {str(name): FileIdentity(**entry) for name, entry in fields["files"].items()}
    return ModelRecord(str(fields["path"]), fields["commit"], identities)


def some(names: Collection[str]) -> str:
    """Names for a message: the first three."""
    first = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(first)}{more}"
