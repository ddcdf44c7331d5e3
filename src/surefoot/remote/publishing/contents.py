"""Which files of a run, a checkpoint, a model's folder or a GGUF file are uploaded."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.disk.commit import committed, named
from ...checkpoint.disk.folder import open_checkpoint
from ...checkpoint.disk.manifest import MANIFEST, Manifest, dump
from ...checkpoint.layouts.detection import detect_layout
from ...checkpoint.reading.verification import verify
from ...errors import CheckpointError, ModelError
from ...recipe.files import ADAPTER, is_run
from ...recipe.run_checkpoint import checkpoint_of
from ...storage.files import read_json
from ...storage.hashes import digest
from ...storage.hubs.upload import LocalFile
from ...training.callbacks.launches import NAME as LAUNCHES
from ...training.callbacks.plot import NAME as PLOT
from .redaction import Redaction

logger = logging.getLogger(__name__)
BASE = "base_model_name_or_path"
_OF_A_RESUME = ("state.json", "trainer_state.json", "base_models.json")


@dataclass(frozen=True)
class Publication:
    """What ``path`` means, and its files."""

    folder: Path  # of the model: a checkpoint, an export, or the folder of a GGUF file
    run: Path | None  # the folder of its run, if it is there
    files: tuple[LocalFile, ...]
    told: tuple[str, ...] = ()  # what the user should know

    @property
    def source(self) -> str:
        """What distinguishes the run from all others: its first launch; empty if unknown."""
        path = self.run and self.run / LAUNCHES
        if path is None or not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.sha256(file.readline()).hexdigest()[:32]


def find_model(path: Path) -> tuple[Path, Path | None]:
    """The model that ``path`` means, and the folder of its run. Raises ``CheckpointError`` or
    ``ModelError``: there is none, or it is damaged."""
    if path.is_file() and path.suffix == ".gguf":
        return path, None
    if not path.is_dir():
        raise ModelError(
            f"no folder {path}; expected a run, a checkpoint, a model's folder or a GGUF file"
        )
    if is_run(path) or (detect_layout(path) is None and named(path)):
        return checkpoint_of(path), path
    if detect_layout(path) is None and not any(path.glob("*.gguf")):
        raise ModelError(f"{path}: contains no weights; expected a run, a checkpoint or a model")
    is_in_run = (path / MANIFEST).is_file() and path in named(path.parent)
    return path, path.parent if is_in_run else None


def gather(
    path: Path, redaction: Redaction, *, checkpoints: bool = False, base: str | None = None
) -> Publication:
    """The files to upload for ``path``, each under its name in the repository."""
    model, run = find_model(path)
    if checkpoints and run is None:
        raise ModelError(f"{path}: --checkpoints uploads those of a run; name the run's folder")
    told: list[str] = []
    files = {f.path: f for f in _cleaned(_model_files(model), redaction, told)}
    folder = model.parent if model.is_file() else model
    if ADAPTER in files:
        files[ADAPTER] = _with_base(files[ADAPTER], folder, base, told)
    if run is not None and (run / PLOT).is_file():
        files[PLOT] = LocalFile(PLOT, run / PLOT)
    if checkpoints and run is not None:
        for each in _checkpoints(run, redaction, base):
            files[each.path] = each
    ordered = tuple(files[name] for name in sorted(files))
    return Publication(folder, run, ordered, tuple(dict.fromkeys(told)))


def _model_files(model: Path) -> Iterator[LocalFile]:
    """The files that other programs open: no optimizer, and no state of a run."""
    if model.is_file():
        stem = model.name.removesuffix(".gguf")
        for beside in sorted(model.parent.iterdir()):
            is_its = beside.name == model.name or beside.name.startswith(f"{stem}.")
            if is_its and beside.is_file() and not beside.name.endswith(".part"):
                yield LocalFile(beside.name, beside)
        return
    report = verify(model, full=True)
    if not report.ok:
        raise CheckpointError(f"{report.problems[0]}; it is not uploaded")
    names = _own(model) if (model / MANIFEST).is_file() else _all(model)
    for name in names:
        yield LocalFile(name, model / name)


def _all(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(p.startswith((".", "__")) for p in parts):
            yield "/".join(parts)


def _own(checkpoint: Path) -> Iterator[str]:
    manifest = open_checkpoint(checkpoint).manifest
    if manifest.layout == "distributed":
        raise CheckpointError(
            f"{checkpoint}: its weights are in a folder for each rank, which other programs do not "
            f"open; run `surefoot export {checkpoint} FOLDER`, then `surefoot push FOLDER`"
        )
    for name in sorted(manifest.files):
        roles = {piece.tensor.partition("/")[0] for piece in manifest.pieces_of_file.get(name, ())}
        is_state = bool(roles) and all(r == "state" or r.endswith("optimizer") for r in roles)
        if not is_state and name not in _OF_A_RESUME:
            yield name


def _cleaned(
    files: Iterator[LocalFile], redaction: Redaction, told: list[str]
) -> Iterator[LocalFile]:
    for file in files:
        data, said = _text(file, redaction)
        if said:
            told.append(said)
        yield file if data is None else replace(file, source=data)


def _text(file: LocalFile, redaction: Redaction) -> tuple[bytes | None, str | None]:
    """The bytes of a file without what is not published; None if nothing changes."""
    if not redaction.reads(file.path, file.size):
        return None, None
    before = file.read()
    after, said = redaction.cleaned(file.path, before)
    return (None if after == before else after), said


def _with_base(file: LocalFile, folder: Path, base: str | None, told: list[str]) -> LocalFile:
    """The adapter's settings with a base that others can find."""
    settings = json.loads(file.read())
    stored = read_json(folder / ADAPTER).get(BASE)
    if base is None and stored and Path(stored).is_absolute():
        told.append(
            f"the base model is a folder of this machine, {stored}: name its id on the hub with "
            "--base, so that others can load the adapter"
        )
    settings[BASE] = base or settings.get(BASE)
    return replace(file, source=(json.dumps(settings, indent=2) + "\n").encode())


def _checkpoints(run: Path, redaction: Redaction, base: str | None) -> Iterator[LocalFile]:
    """All checkpoints of a run with their states, each complete under its manifest."""
    for folder in sorted(committed(run)):
        report = verify(folder, full=True)
        if not report.ok:
            logger.warning("%s is not uploaded: %s", folder.name, report.problems[0])
            continue
        yield from _complete(folder, redaction, base)


def _complete(folder: Path, redaction: Redaction, base: str | None) -> Iterator[LocalFile]:
    manifest, changed = open_checkpoint(folder).manifest, dict[str, bytes]()
    for name in manifest.files:
        file = LocalFile(name, folder / name)
        if name == ADAPTER:
            file = _with_base(next(_cleaned(iter([file]), redaction, [])), folder, base, [])
        data = file.source if isinstance(file.source, bytes) else _text(file, redaction)[0]
        if data is not None:
            changed[name] = data
        yield LocalFile(f"{folder.name}/{name}", folder / name if data is None else data)
    yield LocalFile(f"{folder.name}/{MANIFEST}", dump(_changed(manifest, changed)))


def _changed(manifest: Manifest, changed: dict[str, bytes]) -> Manifest:
    sizes = {name: len(data) for name, data in changed.items()}
    hashes = {name: digest(data) for name, data in changed.items()}
    return replace(
        manifest, files={**manifest.files, **sizes}, hashes={**manifest.hashes, **hashes}
    )
