"""Upload a model to a hub: gather the files, compare with the repository, send what it lacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ...errors import ModelError, counted
from ...storage.hubs.file_download import offline_setting
from ...storage.hubs.huggingface_upload import HuggingFaceUpload
from ...storage.hubs.names import is_repository_name
from ...storage.hubs.upload import LocalFile, LostConnectionError, Repository
from .card import facts_of, license_files, model_card
from .changes import CARD, MARKER, Changes, Marker, compare, marker_of, parse
from .contents import Publication, gather
from .redaction import Redaction, redaction_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
TRIES, WAIT = 5, 1.0  # in a row without progress; seconds before the second one, then doubled
SHOWN = 5  # files of somebody else that an error names


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where to, and how."""

    name: str
    is_private: bool = True
    replaces: bool = False  # what somebody else has put there
    base: str | None = None  # id of an adapter's base model on the hub
    license: str | None = None  # unset, that of the base model


@dataclass(frozen=True)
class Upload:
    """What an upload would do, or has done."""

    target: Destination
    url: str
    files: tuple[LocalFile, ...]
    changes: Changes
    is_new: bool = False  # the repository does not exist yet
    told: tuple[str, ...] = ()


def push(
    path: Path,
    target: Destination,
    *,
    checkpoints: bool = False,
    dry_run: bool = False,
) -> Upload:
    """Upload the model at ``path``. What an interrupted call has uploaded is not sent again.

    Args:
        path: a run, a checkpoint, a model's folder or a GGUF file.
        target: the repository; private unless it says otherwise.
        checkpoints: also all checkpoints of the run, with the states that a resume needs.
        dry_run: change nothing. Without a network, the repository is not looked at.

    Raises:
        SurefootError: there is no model, the repository has other files, or the hub refuses.
    """
    if not is_repository_name(target.name):
        raise ModelError(f"{target.name!r} is not a repository's name; expected owner/name")
    setting = offline_setting()
    if setting is not None and not dry_run:
        raise ModelError(f"{setting} is set, so nothing can be uploaded; unset it")
    hub = HuggingFaceUpload()
    cleaner = redaction_of([path.resolve(), path.resolve().parent])
    contents = gather(path, cleaner, checkpoints=checkpoints, base=target.base)
    files, told = _with_card(contents, hub, target, cleaner)
    if dry_run:
        try:
            if setting is not None:
                raise LostConnectionError(f"{setting} is set")
            plan = _planned(hub, target, files, contents.source, dry_run=True)
        except LostConnectionError as error:
            plan = Upload(target, hub.url(target.name), files, Changes(added=files))
            told.append(f"{error}; the repository was not looked at, and all files are listed")
    else:
        plan = _retried(lambda: _planned(hub, target, files, contents.source, dry_run=False))
        _retried(lambda: _upload(hub, target, files, contents.source))
    return Upload(target, plan.url, files, plan.changes, plan.is_new, (*contents.told, *told))


def _with_card(
    contents: Publication, hub: HuggingFaceUpload, target: Destination, cleaner: Redaction
) -> tuple[tuple[LocalFile, ...], list[str]]:
    """The files with a model card, and the texts of the base model's license."""
    facts = facts_of(contents, target.name, target.base)
    if target.license is not None:
        facts = replace(facts, license=target.license)
    elif facts.license is None and facts.base and is_repository_name(facts.base):
        facts = replace(facts, license=hub.license(facts.base))
    told = []
    if facts.license is None:
        told.append("the license of the base model is unknown; name it with --license")
    files = {file.path: file for file in contents.files}
    for path in license_files(contents):
        files.setdefault(path.name, LocalFile(path.name, path))
    if CARD not in files:
        text, said = cleaner.cleaned(CARD, model_card(facts).encode())
        files[CARD] = LocalFile(CARD, text)
        told += [said] if said else []
    return tuple(files[name] for name in sorted(files)), told


def _planned(
    hub: HuggingFaceUpload,
    target: Destination,
    files: tuple[LocalFile, ...],
    source: str,
    *,
    dry_run: bool,
) -> Upload:
    """Compare with the repository. Raises ``ModelError`` if it is not to be changed."""
    there = hub.find(target.name)
    if there is None:
        return Upload(target, hub.url(target.name), files, Changes(added=files), is_new=True)
    changes = compare(files, there.files, _marker(hub, target, there), source)
    if not dry_run:
        _refuse(target, there, changes)
    return Upload(target, hub.url(target.name), files, changes)


def _refuse(target: Destination, there: Repository, changes: Changes) -> None:
    if target.is_private and not there.is_private:
        raise ModelError(
            f"{target.name} exists and is public; upload to a private repository, or say --public"
        )
    if changes.foreign and not target.replaces:
        shown = ", ".join(changes.foreign[:SHOWN])
        more = len(changes.foreign) - SHOWN
        rest = f" and {counted(more, 'other file')}" if more > 0 else ""
        raise ModelError(
            f"{target.name} exists and holds something else ({shown}{rest}); choose another name, "
            "or say --replace to overwrite files of the same names and keep the others"
        )


def _upload(
    hub: HuggingFaceUpload, target: Destination, files: tuple[LocalFile, ...], source: str
) -> None:
    """Bring the repository to the state of ``files``. Called again, it continues."""
    there = hub.find(target.name)
    if there is None:
        hub.create(target.name, private=target.is_private)
        there = hub.find(target.name)
        if there is None:
            raise LostConnectionError(f"{target.name} was created, but the hub does not show it")
    before = _marker(hub, target, there)
    changes = compare(files, there.files, before, source)
    _refuse(target, there, changes)
    replaced = [file for file in files if file.path in changes.foreign]
    marker = LocalFile(MARKER, marker_of(files, changes, before, source).dump())
    added = [*changes.added, *replaced]
    entry = there.files.get(MARKER)
    if added or changes.removed or entry is None or not entry.is_same(marker.sha256, marker.git):
        hub.commit(target.name, there, [*added, marker], changes.removed)


def _marker(hub: HuggingFaceUpload, target: Destination, there: Repository) -> Marker | None:
    return parse(hub.read(target.name, MARKER, there)) if MARKER in there.files else None


def _retried(attempt: Callable[[], T]) -> T:
    """Call ``attempt`` until the connection holds."""
    for number in range(TRIES):
        try:
            return attempt()
        except LostConnectionError as error:
            if number + 1 == TRIES:
                raise
            logger.info("%s; resuming", error)
            time.sleep(WAIT * 2**number)
    raise AssertionError("unreachable")
