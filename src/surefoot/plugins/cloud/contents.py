"""Which files of a run, a checkpoint, a model's folder or a GGUF file are published (``gather``).

Their texts are without secrets, and without folders of this machine (``Redaction``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.disk.commit import committed, named
from ...checkpoint.disk.folder import open_checkpoint
from ...checkpoint.disk.manifest import MANIFEST, dump
from ...checkpoint.layouts.detection import detect_layout
from ...checkpoint.verification import verify
from ...errors import CheckpointError, ModelError, counted
from ...recipe.files import ADAPTER, is_run
from ...recipe.run_recipe import checkpoint_of
from ...run.card import BASE
from ...storage.files import digest, open_stream, read_file, read_json
from ...training.callbacks.launches import NAME as LAUNCHES
from ...training.callbacks.metric_files import PLOT

logger = logging.getLogger(__name__)
_OF_A_RESUME = ("state.json", "trainer_state.json", "base_models.json")


@dataclass(frozen=True)
class LocalFile:
    """A file to upload, under a name of its own. ``source`` is a path, or the bytes."""

    path: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def read(self) -> bytes:
        """All bytes."""
        return self.source if isinstance(self.source, bytes) else read_file(self.source)


@dataclass(frozen=True)
class Publication:
    """What ``path`` means, and its files by their names in the repository."""

    folder: Path  # of the model: a checkpoint, an export, or the folder of a GGUF file
    run: Path | None  # the folder of its run, if it is there
    files: Mapping[str, LocalFile]

    @property
    def source(self) -> str:
        """What distinguishes the run from all others: its first launch; empty if unknown."""
        path = self.run and self.run / LAUNCHES
        if path is None or not path.is_file():
            return ""
        with open_stream(path) as file:
            return hashlib.sha256(file.readline()).hexdigest()[:32]


def gather(
    path: Path,
    redaction: Redaction,
    notes: list[str],
    *,
    checkpoints: bool = False,
    base: str | None = None,
) -> Publication:
    """The files to upload for ``path``; ``notes`` get what the user should know."""
    model, run = find_model(path)
    folder = model.parent if model.is_file() else model
    files = {f.path: redaction.cleaned(f, notes) for f in _model_files(model)}
    if ADAPTER in files:
        stored = read_json(folder / ADAPTER).get(BASE)
        if base is None and stored and Path(stored).is_absolute():
            notes.append(
                f"the base model is a folder of this machine, {stored}: name its id on the hub "
                "with --base, so that others can load the adapter"
            )
        files[ADAPTER] = _with_base(files[ADAPTER], base)
    if run is not None and (run / PLOT).is_file():
        files[PLOT] = LocalFile(PLOT, run / PLOT)
    if checkpoints:
        if run is None:
            raise ModelError(f"{path}: --checkpoints uploads those of a run; name the run's folder")
        files |= {file.path: file for file in _checkpoints(run, redaction, base)}
    return Publication(folder, run, files)


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


def _model_files(model: Path) -> Iterator[LocalFile]:
    """The files that other programs open: no optimizer, and no state of a run."""
    if model.is_file():
        stem = model.name.removesuffix(".gguf")
        for path in sorted(model.parent.iterdir()):  # with its Modelfile and the like
            is_of_model = path.name == model.name or path.name.startswith(f"{stem}.")
            if is_of_model and path.is_file() and not path.name.endswith(".part"):
                yield LocalFile(path.name, path)
        return
    report = verify(model, full=True)
    if not report.ok:
        raise CheckpointError(f"{report.problems[0]}; it is not uploaded")
    if (model / MANIFEST).is_file():
        yield from (LocalFile(name, model / name) for name in _weights_and_configuration(model))
        return
    for path in sorted(model.rglob("*")):
        name = path.relative_to(model)
        if path.is_file() and not any(part.startswith((".", "__")) for part in name.parts):
            yield LocalFile(name.as_posix(), path)


def _weights_and_configuration(checkpoint: Path) -> Iterator[str]:
    manifest = open_checkpoint(checkpoint).manifest
    if manifest.layout == "distributed":
        raise CheckpointError(
            f"{checkpoint}: its weights are in a folder for each rank, which other programs do not "
            f"open; run `surefoot export {checkpoint} FOLDER`, then `surefoot push FOLDER`"
        )
    for name in sorted(manifest.files):
        roles = {piece.tensor.partition("/")[0] for piece in manifest.pieces_of(name)}
        is_state = bool(roles) and all(r == "state" or r.endswith("optimizer") for r in roles)
        if not is_state and name not in _OF_A_RESUME:
            yield name


def _with_base(file: LocalFile, base: str | None) -> LocalFile:
    """The adapter's settings with a base that others can find."""
    settings = json.loads(file.read())
    settings[BASE] = base or settings.get(BASE)
    return replace(file, source=(json.dumps(settings, indent=2) + "\n").encode())


def _checkpoints(run: Path, redaction: Redaction, base: str | None) -> Iterator[LocalFile]:
    """All checkpoints of a run with their states, each sealed again where its texts have changed,
    so that its manifest is complete."""
    for folder in sorted(committed(run)):
        report = verify(folder, full=True)
        if not report.ok:
            logger.warning("%s is not uploaded: %s", folder.name, report.problems[0])
            continue
        manifest = open_checkpoint(folder).manifest
        sizes, hashes = dict(manifest.files), dict(manifest.hashes)
        for name in manifest.files:
            file = redaction.cleaned(LocalFile(name, folder / name), [])
            file = _with_base(file, base) if name == ADAPTER else file
            if isinstance(file.source, bytes):
                sizes[name], hashes[name] = len(file.source), digest(file.source)
            yield replace(file, path=f"{folder.name}/{name}")
        sealed = dump(replace(manifest, files=sizes, hashes=hashes))
        yield LocalFile(f"{folder.name}/{MANIFEST}", sealed)


_REMOVED = "<removed>"
_TEXT = (".json", ".jsonl", ".yaml", ".yml", ".md", ".txt", ".jinja", ".Modelfile")
_VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
_MAX_BYTES = 64 << 20  # of a text that is searched
# Tokens of Hugging Face, ModelScope, OpenAI, GitHub and AWS, private keys, passwords in URLs.
_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\bms-[0-9a-f]{8}-[0-9a-f-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
_NAMES = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$")
# Paths are known by how they begin: chat templates of published models have paths of sandboxes,
# which a general pattern would remove, too (decisions/0068).
_HOMES = r"/(?:home|Users)/[^/\s\"']+|/root"
_REST = r"((?:/[^/\s\"',;`)\]}]+)*)/?"
_BEFORE = r"(?<![\w./~:-])"


@dataclass(frozen=True)
class Redaction:
    """What must not appear in a text: values of secrets, and folders of this machine."""

    secrets: tuple[str, ...]
    folders: tuple[str, ...]

    def apply(self, text: str) -> tuple[str, int]:
        """``text`` without them, and the number of secrets. A path keeps its last part."""
        text, number = _SECRETS.subn(_REMOVED, text)
        for value in self.secrets:
            number += text.count(value)
            text = text.replace(value, _REMOVED)
        roots = "|".join([*map(re.escape, self.folders), _HOMES])
        return re.sub(f"{_BEFORE}(?:{roots})(?![^/\\s\"',;`)\\]}}]){_REST}", _last, text), number

    def cleaned(self, file: LocalFile, notes: list[str]) -> LocalFile:
        """A file without them if it is text; ``notes`` get how many secrets there were. A
        vocabulary is left as it is."""
        name = Path(file.path).name
        is_text = Path(name).suffix in _TEXT or name == "Modelfile"
        # A token that looks like a path or a key is still a token.
        if not is_text or name in _VOCABULARY or file.size > _MAX_BYTES:
            return file
        before = file.read()
        try:
            text, number = self.apply(before.decode())
        except UnicodeDecodeError:
            return file
        if number:
            notes.append(f"{file.path}: {counted(number, 'secret was', 'secrets were')} removed")
        after = text.encode()
        return file if after == before else replace(file, source=after)


def redaction_of(folders: Iterable[Path]) -> Redaction:
    """Secrets of the environment; this user's folder, the current one, and ``folders``."""
    # A shorter value may be a word of any text.
    values = {v for name, v in os.environ.items() if _NAMES.search(name) and len(v) >= 8}
    roots = {Path(os.environ.get("HOME") or "/"), Path.cwd(), Path(tempfile.gettempdir()), *folders}
    paths = {str(root) for root in roots} | {str(root.resolve()) for root in roots}
    # Not `/`, with which all paths begin; longest first, as of two alternatives the first one wins.
    longest = sorted((f for f in paths if len(Path(f).parts) > 1), key=len, reverse=True)
    return Redaction(tuple(sorted(values)), tuple(longest))


def _last(match: re.Match[str]) -> str:
    """The last part of a path, which is not the name of its user."""
    return match[1].rpartition("/")[2] or "."
