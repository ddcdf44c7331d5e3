"""Upload a model to the Hugging Face hub: compared with the repository, and changed in one commit.

``surefoot.json`` in the repository names the run that was uploaded, and the hash of every file. So
a later upload of the same run knows which files are its own, which are out of date, and which were
edited there. The library asks the hub which contents it has by their hash, and sends the others. So
an upload that was interrupted sends nothing twice, and the repository changes at once or not at
all.

``python -m surefoot.plugins.cloud.pushing FOLDER SETTINGS`` uploads while a run trains; its last
line is empty, or why it failed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from ...checkpoint.disk.commit import step_of
from ...errors import ModelError, SurefootError, counted
from ...storage.hubs import HubError, is_repository_name, offline_setting
from .card import base_name, license_files, license_of, model_card, origin_of
from .contents import LocalFile, Publication, Redaction, gather, redaction_of

logger = logging.getLogger(__name__)
MARKER, CARD = "surefoot.json", "README.md"
FORMAT = "surefoot-upload"
TRIES, WAIT = 5, 1.0  # in a row without progress; seconds before the second one, then doubled
SHOWN = 5  # files of somebody else that an error names
_OF_THE_HUB = ".gitattributes"  # which it creates by itself
_DENIED, _TEMPORARY = (401, 403), (408, 412, 429, 500, 502, 503, 504)  # HTTP status


class LostConnectionError(HubError):
    """An upload was interrupted; the same call continues it."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where to, and how."""

    name: str
    is_private: bool = True
    replaces: bool = False  # what somebody else has put there
    base: str | None = None  # id of an adapter's base model on the hub
    license: str | None = None  # unset, that of the base model


@dataclass(frozen=True)
class Changes:
    """The difference between files here and a repository."""

    added: tuple[LocalFile, ...] = ()  # that the repository lacks, or has in an older form
    removed: tuple[str, ...] = ()  # uploaded before, and not part of it any more
    kept: tuple[str, ...] = ()  # edited in the repository, and left as they are there
    foreign: tuple[str, ...] = ()  # that somebody else has put there


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
    api = HfApi(endpoint=constants.ENDPOINT)
    url = f"{api.endpoint}/{target.name}"
    redaction = redaction_of([path.resolve(), path.resolve().parent])
    contents = gather(path, redaction, checkpoints=checkpoints, base=target.base)
    told = list(contents.told)
    files = _with_card(contents, api, target, redaction, told)
    plans: list[Upload] = []  # of each try; the first is what the upload changes in all

    def attempt() -> None:
        if setting is not None:
            raise LostConnectionError(f"{setting} is set")
        there = _find(api, target.name)
        changes = Changes(added=files)
        if there is not None:
            changes = _compare(files, there, contents.source)
        plans.append(Upload(target, url, files, changes, there is None))
        if not dry_run:
            _upload(api, plans[-1], there, contents.source)

    if not dry_run:
        _retried(attempt)
    else:
        try:
            attempt()
        except LostConnectionError as error:
            plans.append(Upload(target, url, files, Changes(added=files)))
            told.append(f"{error}; the repository was not looked at, and all files are listed")
    first = plans[0]
    return Upload(target, url, files, first.changes, first.is_new, tuple(told))


def _with_card(
    contents: Publication,
    api: HfApi,
    target: Destination,
    redaction: Redaction,
    told: list[str],
) -> tuple[LocalFile, ...]:
    """The files with a model card, and the texts of the base model's license."""
    origin = origin_of(contents.folder)
    base = target.base or base_name(origin)
    terms = target.license or license_of(origin)
    if terms is None and base and is_repository_name(base):
        terms = _license_on_hub(api, base)
    if terms is None:
        told.append("the license of the base model is unknown; name it with --license")
    files = {file.path: file for file in contents.files}
    for path in license_files(origin):
        files.setdefault(path.name, LocalFile(path.name, path))
    if CARD not in files:
        card = model_card(contents, target.name, base, terms)
        files[CARD] = redaction.cleaned(LocalFile(CARD, card.encode()), told)
    return tuple(files[name] for name in sorted(files))


@dataclass(frozen=True)
class Repository:
    """A repository of a hub as it is now, and what was uploaded to it last."""

    is_private: bool
    commit: str
    files: Mapping[str, RepoFile]
    source: str  # the run that was uploaded last; empty if none was
    uploaded: Mapping[str, tuple[str, str]]  # its files: their sha256, and the hash that git has


def _compare(files: Sequence[LocalFile], there: Repository, source: str) -> Changes:
    """What to upload, and what stands in the way. ``source`` is the run of ``files``."""
    uploaded = there.uploaded if source and there.source == source else {}
    unchanged = {
        path
        for path, entry in there.files.items()
        if path in uploaded and _has_hash(entry, *uploaded[path])
    }
    added, kept, foreign = [], [], []
    for file in files:
        entry = there.files.get(file.path)
        is_same = entry is not None and entry.size == file.size
        if entry is not None and is_same and _has_hash(entry, file.sha256, file.git):
            continue
        if entry is None or file.path in unchanged:
            added.append(file)
        elif file.path == CARD and uploaded:
            kept.append(file.path)
        else:
            foreign.append(file.path)
    here = {file.path for file in files} | {MARKER, _OF_THE_HUB}
    others = [path for path in there.files if path not in here]
    removed = [path for path in others if path in unchanged and not _is_of_checkpoint(path)]
    if not uploaded:
        foreign += others
    return Changes(tuple(added), tuple(removed), tuple(kept), tuple(sorted(foreign)))


def _has_hash(entry: RepoFile, sha256: str, git: str) -> bool:
    return entry.lfs.sha256 == sha256 if entry.lfs is not None else entry.blob_id == git


def _is_of_checkpoint(path: str) -> bool:
    return step_of(Path(PurePosixPath(path).parts[0])) >= 0


def _upload(api: HfApi, plan: Upload, there: Repository | None, source: str) -> None:
    """Make the planned changes in one commit. Raises ``ModelError`` where they are not to be
    made."""
    target, changes = plan.target, plan.changes
    if there is None:
        with _explained(target.name):
            api.create_repo(target.name, private=target.is_private, exist_ok=True)
        if (there := _find(api, target.name)) is None:
            raise LostConnectionError(f"{target.name} was created, but the hub does not show it")
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
    before = there.uploaded if there.source == source else {}  # its checkpoints stay
    listed = {path: hashes for path, hashes in before.items() if path not in changes.removed}
    listed |= {f.path: (f.sha256, f.git) for f in plan.files if f.path not in changes.kept}
    fields = {
        "format": FORMAT,
        "version": 1,
        "source": source,
        "files": dict(sorted(listed.items())),
    }
    marker = LocalFile(MARKER, (json.dumps(fields, indent=2) + "\n").encode())
    added = [*changes.added, *(file for file in plan.files if file.path in changes.foreign)]
    entry = there.files.get(MARKER)
    is_marked = entry is not None and _has_hash(entry, marker.sha256, marker.git)
    if is_marked and not (added or changes.removed):
        return
    adding = [_addition(file) for file in [*added, marker]]
    each_once = {file.sha256: _addition(file) for file in [*added, marker]}
    removing = [CommitOperationDelete(path_in_repo=path) for path in changes.removed]
    with _explained(target.name):
        api.preupload_lfs_files(target.name, list(each_once.values()), free_memory=False)
        api.create_commit(
            target.name,
            [*adding, *removing],
            commit_message="Upload with Surefoot",
            parent_commit=there.commit or None,
        )


def _addition(file: LocalFile) -> CommitOperationAdd:
    source = file.source if isinstance(file.source, bytes) else str(file.source)
    return CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=source)


def _find(api: HfApi, name: str) -> Repository | None:
    """The repository; None if it does not exist."""
    with _explained(name):
        try:
            about = api.model_info(name)
        except RepositoryNotFoundError:
            return None
        tree = api.list_repo_tree(name, recursive=True, revision=about.sha)
        files = {each.path: each for each in tree if isinstance(each, RepoFile)}
        marker = b""
        if MARKER in files:
            url = hf_hub_url(name, MARKER, revision=about.sha, endpoint=constants.ENDPOINT)
            answer = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
            hf_raise_for_status(answer)
            marker = answer.content
    return Repository(bool(about.private), about.sha or "", files, *_parsed(marker))


def _parsed(data: bytes) -> tuple[str, Mapping[str, tuple[str, str]]]:
    """What was uploaded last, as the marker in a repository says; nothing if it is not one."""
    try:
        found = json.loads(data)
        listed = {str(path): (str(h[0]), str(h[1])) for path, h in found["files"].items()}
        if found["format"] == FORMAT:
            return str(found["source"]), listed
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "", {}
    return "", {}


def _license_on_hub(api: HfApi, name: str) -> str | None:
    """The license of a model; None if the hub does not say."""
    try:
        with _explained(name):
            about = api.model_info(name).card_data
    except HubError:
        return None
    terms = None if about is None else about.get("license")
    return str(terms) if terms else None


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of the library, in one sentence."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise _said(name, error) from error


def _said(name: str, error: Exception) -> HubError:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if isinstance(cause, LocalTokenNotFoundError) or status in _DENIED:
        return HubError(
            f"{name}: the hub refuses the upload; set HF_TOKEN to a token with write access to it, "
            "or run `hf auth login`"
        )
    if isinstance(cause, HfHubHTTPError):
        answer = cause.server_message or cause.response.text[:200]
        message = f"{name}: the hub answers {status}: {answer}"
        return LostConnectionError(message) if status in _TEMPORARY else HubError(message)
    if isinstance(cause, HTTPError | OSError):
        reason = str(cause) or type(cause).__name__
        return LostConnectionError(f"{constants.ENDPOINT}: connection lost ({reason})")
    return HubError(f"{name}: {str(cause).splitlines()[0]}")


def _retried(attempt: Callable[[], None]) -> None:
    """Call ``attempt`` until the connection holds."""
    for number in range(TRIES):
        try:
            attempt()
            return
        except LostConnectionError as error:
            if number + 1 == TRIES:
                raise
            logger.info("%s; resuming", error)
            time.sleep(WAIT * 2**number)


def main(folder: Path, settings: dict[str, object]) -> int:
    """Upload the run in ``folder``, at low priority."""
    os.nice(19)
    checkpoints = bool(settings.pop("checkpoints"))
    try:
        push(folder, Destination(**settings), checkpoints=checkpoints)  # type: ignore[arg-type]
    except (SurefootError, OSError) as error:
        sys.stdout.write(" ".join(str(error).split()) + "\n")
        return 1
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
