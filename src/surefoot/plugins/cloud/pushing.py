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
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

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
from .card import facts_of, license_files, model_card
from .contents import (
    LocalFile,
    LostConnectionError,
    Publication,
    Redaction,
    RemoteEntry,
    Repository,
    gather,
    redaction_of,
)

MARKER, CARD = "surefoot.json", "README.md"
FORMAT = "surefoot-upload"
_OF_THE_HUB = ".gitattributes"  # which it creates by itself


@dataclass(frozen=True)
class Marker:
    """What was uploaded last: of which run, and the hashes of its files (sha256 and git's)."""

    source: str
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def dump(self) -> bytes:
        """The file in the repository."""
        listed = {path: list(hashes) for path, hashes in sorted(self.files.items())}
        fields = {"format": FORMAT, "version": 1, "source": self.source, "files": listed}
        return (json.dumps(fields, indent=2) + "\n").encode()


@dataclass(frozen=True)
class Changes:
    """The difference between files here and a repository."""

    added: tuple[LocalFile, ...] = ()  # that the repository lacks, or has in an older form
    same: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # uploaded before, and not part of it any more
    kept: tuple[str, ...] = ()  # edited in the repository, and left as they are there
    foreign: tuple[str, ...] = ()  # that somebody else has put there


def parse(data: bytes) -> Marker | None:
    """The marker in a repository; None if it is not one."""
    try:
        found = json.loads(data)
        listed = {str(path): (str(h[0]), str(h[1])) for path, h in found["files"].items()}
        return Marker(str(found["source"]), listed) if found["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def compare(
    files: Sequence[LocalFile],
    there: Mapping[str, RemoteEntry],
    marker: Marker | None,
    source: str,
) -> Changes:
    """What to upload, and what stands in the way. ``source`` is the run of ``files``."""
    own = marker.files if marker is not None and source and marker.source == source else {}
    is_own = {p: p in own and entry.is_same(*own[p]) for p, entry in there.items()}
    added, same, kept, foreign = [], [], [], []
    for file in files:
        entry = there.get(file.path)
        if entry is None or (is_own[file.path] and not _same(entry, file)):
            added.append(file)
        elif _same(entry, file):
            same.append(file.path)
        elif file.path == CARD and own:
            kept.append(file.path)
        else:
            foreign.append(file.path)
    here = {file.path for file in files} | {MARKER, _OF_THE_HUB}
    others = [path for path in there if path not in here]
    removed = [path for path in others if is_own[path] and not _in_checkpoint(path)]
    if not own:
        foreign += others
    return Changes(tuple(added), tuple(same), tuple(removed), tuple(kept), tuple(sorted(foreign)))


def marker_of(
    files: Sequence[LocalFile], changes: Changes, before: Marker | None, source: str
) -> Marker:
    """The marker once ``changes`` are made. Checkpoints of earlier uploads stay."""
    known = before.files if before is not None and before.source == source else {}
    stay = {path: hashes for path, hashes in known.items() if path not in changes.removed}
    now = {file.path: (file.sha256, file.git) for file in files if file.path not in changes.kept}
    return Marker(source, {**stay, **now})


def _same(entry: RemoteEntry, file: LocalFile) -> bool:
    if entry.size != file.size:
        return False
    return entry.sha256 == file.sha256 if entry.sha256 else entry.git == file.git


def _in_checkpoint(path: str) -> bool:
    return step_of(Path(PurePosixPath(path).parts[0])) >= 0


_DENIED, _TEMPORARY = (401, 403), (408, 412, 429, 500, 502, 503, 504)  # HTTP status


class HuggingFaceUpload:
    """Repositories of models on the Hugging Face hub, or on the mirror in HF_ENDPOINT."""

    def __init__(self) -> None:
        self._api = HfApi(endpoint=constants.ENDPOINT)

    def url(self, name: str) -> str:
        """The page of a repository."""
        return f"{self._api.endpoint}/{name}"

    def find(self, name: str) -> Repository | None:
        """The repository; None if it does not exist."""
        with _explained(name):
            try:
                about = self._api.model_info(name)
            except RepositoryNotFoundError:
                return None
            listed = self._api.list_repo_tree(name, recursive=True, revision=about.sha)
            found = {each.path: _entry(each) for each in listed if isinstance(each, RepoFile)}
        return Repository(bool(about.private), about.sha or "", found)

    def read(self, name: str, path: str, at: Repository) -> bytes:
        """A small file of the repository."""
        with _explained(name):
            url = hf_hub_url(name, path, revision=at.commit, endpoint=constants.ENDPOINT)
            answer = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
            hf_raise_for_status(answer)
            return answer.content

    def license(self, name: str) -> str | None:
        """The license of a model; None if the hub does not say."""
        try:
            with _explained(name):
                about = self._api.model_info(name).card_data
        except HubError:
            return None
        found = None if about is None else about.get("license")
        return str(found) if found else None

    def create(self, name: str, *, private: bool) -> None:
        """Create an empty repository."""
        with _explained(name):
            self._api.create_repo(name, private=private, exist_ok=True)

    def commit(
        self, name: str, at: Repository, added: Sequence[LocalFile], removed: Sequence[str]
    ) -> None:
        """Upload files and remove others, in one commit."""
        adding = [_addition(file) for file in added]
        each_once = {file.sha256: _addition(file) for file in added}
        removing = [CommitOperationDelete(path_in_repo=path) for path in removed]
        with _explained(name):
            self._api.preupload_lfs_files(name, list(each_once.values()), free_memory=False)
            self._api.create_commit(
                name,
                [*adding, *removing],
                commit_message="Upload with Surefoot",
                parent_commit=at.commit or None,
            )


def _addition(file: LocalFile) -> CommitOperationAdd:
    source = file.source if isinstance(file.source, bytes) else str(file.source)
    return CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=source)


def _entry(file: RepoFile) -> RemoteEntry:
    if file.lfs is not None:
        return RemoteEntry(file.size, sha256=file.lfs.sha256)
    return RemoteEntry(file.size, git=file.blob_id)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of the library, in one sentence."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise _said(name, error) from error


def _said(name: str, error: Exception) -> HubError:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    if isinstance(cause, LocalTokenNotFoundError):
        return _no_token(name)
    if isinstance(cause, HfHubHTTPError):
        return _answered(name, cause)
    if isinstance(cause, HTTPError | OSError):
        said = str(cause) or type(cause).__name__
        return LostConnectionError(f"{constants.ENDPOINT}: connection lost ({said})")
    return HubError(f"{name}: {str(cause).splitlines()[0]}")


def _answered(name: str, error: HfHubHTTPError) -> HubError:
    status = error.response.status_code
    if status in _DENIED:
        return _no_token(name)
    said = f"{name}: the hub answers {status}: {error.server_message or error.response.text[:200]}"
    return LostConnectionError(said) if status in _TEMPORARY else HubError(said)


def _no_token(name: str) -> HubError:
    return HubError(
        f"{name}: the hub refuses the upload; set HF_TOKEN to a token with write access to it, or "
        "run `hf auth login`"
    )


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
