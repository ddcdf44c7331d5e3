"""``receipt.json``: what an exported artefact was made from, its files, and its verification."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ... import __version__
from ...checkpoint.disk.commit import step_of
from ...checkpoint.layouts.layout import Reading
from ...errors import CheckpointError, ModelError
from ...model import base_identity
from ...model.base_identity import BaseModel, FileIdentity
from ...model.section import ModelSection
from ...recipe.files import RUN_RECIPE
from ...run.card import CARD
from ...schema.locations import ModelPath
from ...storage import files
from ..model_loading import ModelFolders

NAME = "receipt.json"
_FORMAT = 1
_LIMIT = 1 << 24  # bytes of a receipt
_BASE = "base"  # the role of an adapter's base in the record
_OPENED = (".json", ".jinja", ".model", ".py", ".safetensors", ".bin")  # by programs, if there


@dataclass(frozen=True)
class Artefact:
    """The format that was written."""

    to: str  # ``huggingface``, ``gguf``, ...
    type: str  # of the weights: ``float32``, ``q4_k_m``, ``w4a16``
    num_weights: int  # of the model that it opens as
    is_rounded: bool = True  # False: the weights have the checkpoint's bits
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportOrigin:
    """What it was made from."""

    checkpoint: str  # its folder, that of an adapter if it has one
    base: str | None  # the folder of an adapter's base
    step: int | None
    files: Mapping[str, str]  # hashes of weights and configuration; of an adapter, ``adapter/...``
    recipe: str | None  # hash of the run's recipe
    reading: Reading = field(default_factory=dict)  # how another program's is read

    @property
    def manifest(self) -> str | None:
        """The hash of the manifest of a Surefoot checkpoint, which has the hash of every tensor."""
        prefix = "" if self.base is None else "adapter/"
        return self.files.get(f"{prefix}manifest.json")


@dataclass(frozen=True)
class Receipt:
    """The content of ``receipt.json``."""

    artefact: Artefact
    made_from: ExportOrigin
    files: Mapping[str, FileIdentity]  # of the artefact, by name
    verified: Mapping[str, Any] | None = None  # None: not yet
    surefoot: str = __version__
    created: str = ""

    def dump(self) -> bytes:
        """As JSON."""
        content = {"format": _FORMAT, **asdict(self)}
        content["made_from"]["manifest"] = self.made_from.manifest
        content["files"] = {
            name: {"size": identity.size, "hash": identity.hash}
            for name, identity in self.files.items()
        }
        return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def receipt_path(target: Path) -> Path:
    """Of a folder, in it; of a file, beside it."""
    return target / NAME if target.is_dir() else target.with_name(f"{target.stem}.{NAME}")


def write_receipt(
    target: Path, parts: ModelFolders, artefact: Artefact, names: Sequence[str] = ()
) -> Receipt:
    """Write the receipt of ``target``, made from ``parts``: of a folder with all its files, or of a
    file, whose companions are those of ``names`` beside it."""
    folder, file_names = target.parent, [target.name, *names]
    if target.is_dir():
        inside = (path for path in target.rglob("*") if path.is_file())
        folder, file_names = target, [str(path.relative_to(target)) for path in inside]
        # The receipt cannot have a hash of itself, and people write into the card.
        file_names = [name for name in file_names if name not in (NAME, CARD)]
    receipt = Receipt(
        artefact,
        origin_of(parts),
        {name: identity_of(folder / name) for name in sorted(file_names)},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    store(target, receipt)
    return receipt


def delete_artefact(target: Path) -> None:
    """Delete a folder or file that was written, with its companions and its receipt."""
    names = {target.name}
    if not target.is_dir():
        names |= {*read_receipt(target).files, receipt_path(target).name}
    for name in names:
        files.remove_tree(target.parent / name)


def store(target: Path, receipt: Receipt) -> None:
    """Write ``receipt``, in place of another."""
    with files.raising(CheckpointError, "cannot write the receipt"):
        files.write_aside(receipt_path(target), receipt.dump())


def read_receipt(target: Path) -> Receipt:
    """The receipt of an artefact. Raises ``ModelError`` if it has none that can be read."""
    path = receipt_path(target)
    if not files.exists(path):
        raise ModelError(
            f"{target}: has no {path.name}; `surefoot export` writes it, so export the model again"
        )
    try:
        with files.open_file(path) as file:
            content = files.parse_json(files.read_all(file, _LIMIT))
        version = content.pop("format")
        if version != _FORMAT:
            raise ModelError(
                f"{path}: its format is {version}, this version reads {_FORMAT}; update surefoot"
            )
        origin = {n: v for n, v in content.pop("made_from").items() if n != "manifest"}
        reading = {n: ModelPath(value) for n, value in origin.pop("reading", {}).items()}
        entries = content.pop("files")
        # Without the times of files: an artefact is copied to where it is served.
        identities = {name: FileIdentity(**entry, stamp="") for name, entry in entries.items()}
        return Receipt(
            artefact=Artefact(**content.pop("artefact")),
            made_from=ExportOrigin(**origin, reading=reading),
            files=identities,
            **content,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def origin_of(parts: ModelFolders) -> ExportOrigin:
    """The identity of the folders of a model. Files of an adapter's base that are what the run has
    recorded are not read again."""
    base = None if parts.adapter is None else str(parts.model)
    section = ModelSection(path=str(parts.model))
    model = BaseModel(
        section, parts.model, adapter=parts.adapter, has_adapter_weights=parts.adapter is not None
    )
    # Every byte, not samples: one changed value changes what is computed, and a sample would miss
    # it. XXH3 takes 0.3 s a GiB, so files that the run has recorded, with length, inode and times
    # unchanged, are not read again (docs/decisions/0043).
    before = base_identity.read(parts.folder).get(base_identity.TRAINED)
    recorded = {} if before is None else {_BASE: before}
    record = base_identity.identify({_BASE: model}, recorded)[_BASE]
    recipe, step = parts.folder / RUN_RECIPE, step_of(parts.folder)
    return ExportOrigin(
        str(parts.folder),
        base,
        None if step < 0 else step,
        {name: identity.hash for name, identity in record.files.items()},
        identity_of(recipe).hash if recipe.is_file() else None,
        parts.reading,
    )


def identity_of(path: Path) -> FileIdentity:
    """The hash of all bytes of a file."""
    with files.raising(CheckpointError), files.open_file(path) as file:
        return FileIdentity(base_identity.hash_of_bytes(file), file.size, "")


def changed_files(target: Path, receipt: Receipt) -> list[str]:
    """What is wrong with the files of an artefact, one sentence each."""
    folder = target if target.is_dir() else target.parent
    problems = []
    for name, before in receipt.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif identity_of(path).hash != before.hash:
            problems.append(f"{path} has changed since it was exported")
    # A template or an adapter beside the files that were verified is read with them, or instead.
    inside = target.iterdir() if target.is_dir() else ()
    added = (p for p in inside if p.suffix in _OPENED and p.name not in (NAME, *receipt.files))
    return [*problems, *(f"{path} was added since it was exported" for path in sorted(added))]
