"""Upload a model to the Hugging Face hub: what differs from the repository, in one commit.

``surefoot.json`` in the repository names the run that was uploaded, and its files with their
hashes. So a later upload of the same run knows which files to replace, which are not part of it any
more, and which somebody has edited since. The library asks the hub which contents it has by their
hash, and sends the others. So an upload that was interrupted sends nothing twice, and the
repository changes at once or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from huggingface_hub.utils.sha import git_hash

from ...checkpoint.disk.commit import step_of
from ...errors import ModelError, counted, first_line
from ...run.card import (
    CARD,
    base_name,
    is_written_here,
    license_files,
    license_of,
    model_card,
    origin_of,
)
from ...storage.files import parse_json
from ...storage.remote import HubError, is_repository_name, offline_setting
from ...use.exporting.receipt import changed_files, read_receipt, receipt_path
from .contents import LocalFile, Publication, Redaction, gather, redaction_of

MARKER = "surefoot.json"
FORMAT = "surefoot-upload"
_SHOWN = 5  # files of somebody else that an error names
_OF_THE_HUB = ".gitattributes"  # which it creates by itself
_MAX_IN_GIT = 10 << 20  # bytes; the hub stores larger files by their sha256 alone
_Hashes = tuple[str, str]  # sha256, and the hash that git has, empty for large files


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The repository to upload to, and what may happen to it."""

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
    files: Sequence[LocalFile]
    removed: Sequence[str]  # uploaded before, and not part of the model any more
    is_new: bool  # the repository did not exist before
    notes: Sequence[str]


@dataclass(frozen=True)
class Repository:
    """A repository of a hub as it is now."""

    is_private: bool
    commit: str
    files: Mapping[str, RepoFile]
    source: str  # the run that was uploaded last; empty if none was
    uploaded: Mapping[str, _Hashes]  # its files


def push(
    path: Path, target: Destination, *, checkpoints: bool = False, dry_run: bool = False
) -> Upload:
    """Upload the model at ``path``. What an interrupted call has uploaded is not sent again.

    Args:
        path: a run, a checkpoint, a model's folder or a GGUF file.
        target: the repository; private unless it says otherwise.
        checkpoints: also all checkpoints of the run, with the states that a resume needs.
        dry_run: change nothing.

    Raises:
        SurefootError: there is no model, the repository has other files, or the hub refuses.
    """
    if not is_repository_name(target.name):
        raise ModelError(f"{target.name!r} is not a repository's name; expected owner/name")
    if (setting := offline_setting()) is not None:
        raise ModelError(f"{setting} is set, so nothing can be uploaded; unset it")
    _refuse_changed(path)
    api, notes = HfApi(endpoint=constants.ENDPOINT), list[str]()
    redaction = redaction_of([path.resolve(), path.resolve().parent])
    contents = gather(path, redaction, notes, checkpoints=checkpoints, base=target.base)
    files = _with_card(contents, api, target, redaction, notes)
    with _explained(target.name):
        there = _find(api, target.name)
    removed, uploaded = list[str](), dict[str, _Hashes]()
    if there is not None:
        others = there.files.keys() - {MARKER, _OF_THE_HUB}
        if contents.source and there.source == contents.source:
            uploaded = {**there.uploaded}
            unchanged = {name for name in others if _is_as_uploaded(there, name)}
            others = (others & files.keys()) - unchanged  # would be overwritten, and were edited
            removed = sorted(n for n in unchanged - files.keys() if not _is_of_step(n))
            if CARD in others:
                notes.append(f"{CARD} was edited in the repository, and is left as it is there")
                others.remove(CARD)
                del files[CARD]
        _refuse(there, target, sorted(others))
    uploads = [files[name] for name in sorted(files)]
    url = f"{api.endpoint}/{target.name}"
    upload = Upload(target, url, uploads, removed, there is None, list(dict.fromkeys(notes)))
    if not dry_run:
        with _explained(target.name):
            _commit(api, upload, there, contents.source, uploaded)
    return upload


def _refuse_changed(path: Path) -> None:
    """Raise ``ModelError`` unless the files of an export are those that were verified."""
    receipt = receipt_path(path)
    if receipt.is_file() and (changes := changed_files(path, read_receipt(path))):
        raise ModelError(
            f"{path}: {'; '.join(changes[:_SHOWN])}, so it is not what was verified; export it "
            f"again or, if the change is meant, delete {receipt.name}"
        )


def _with_card(
    contents: Publication, api: HfApi, target: Destination, redaction: Redaction, notes: list[str]
) -> dict[str, LocalFile]:
    """The files with a model card, and the texts of the base model's license."""
    files = dict(contents.files)
    origin = origin_of(contents.folder)
    base = target.base or base_name(origin)
    terms = target.license or license_of(origin)
    if terms is None and base and is_repository_name(base):
        with suppress(HubError), _explained(base):  # a base without a license is only noted
            about = api.model_info(base).card_data
            terms = None if about is None else about.get("license")
    if terms is None:
        notes.append("the license of the base model is unknown; name it with --license")
    for path in license_files(origin):
        files.setdefault(path.name, LocalFile(path.name, path))
    path = contents.folder / CARD
    if CARD not in files or (path.is_file() and is_written_here(path)):
        card = model_card(contents.folder, files, target.name, base, terms and str(terms))
        files[CARD] = redaction.cleaned(LocalFile(CARD, card.encode()), notes)
    return files


def _find(api: HfApi, name: str) -> Repository | None:
    """The repository; None if it does not exist."""
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


def _parsed(marker: bytes) -> tuple[str, dict[str, _Hashes]]:
    """The run and the files that were uploaded last; none if the marker is somebody else's."""
    try:
        content = parse_json(marker)
        files = {str(path): (str(h[0]), str(h[1])) for path, h in content["files"].items()}
        if content["format"] == FORMAT:
            return str(content["source"]), files
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        pass
    return "", {}


def _is_as_uploaded(there: Repository, name: str) -> bool:
    """Whether nobody has changed the file since the last upload of a run."""
    entry, (sha256, git) = there.files[name], there.uploaded.get(name, ("", ""))
    return entry.lfs.sha256 == sha256 if entry.lfs is not None else entry.blob_id == git


def _refuse(there: Repository, target: Destination, others: Sequence[str]) -> None:
    """Raise ``ModelError`` for a repository that must not be changed. ``others`` are files that
    somebody else has put there, or edited."""
    if target.is_private and not there.is_private:
        raise ModelError(
            f"{target.name} exists and is public; upload to a private repository, or say --public"
        )
    if others and not target.replaces:
        more = len(others) - _SHOWN
        rest = f" and {counted(more, 'other file')}" if more > 0 else ""
        raise ModelError(
            f"{target.name} exists and holds something else ({', '.join(others[:_SHOWN])}{rest}); "
            "choose another name, or say --replace to overwrite files of the same names and keep "
            "the others"
        )


def _is_of_step(path: str) -> bool:
    """Whether it belongs to a checkpoint, which stays after an upload without checkpoints."""
    return step_of(Path(PurePosixPath(path).parts[0])) >= 0


def _commit(
    api: HfApi,
    upload: Upload,
    there: Repository | None,
    source: str,
    uploaded: Mapping[str, _Hashes],
) -> None:
    """Make the changes in one commit, which the library omits if there are none. ``uploaded`` are
    files of this run that were uploaded before; those of checkpoints stay."""
    name = upload.target.name
    if there is None:
        # An earlier try may have made it, and failed after that.
        api.create_repo(name, private=upload.target.is_private, exist_ok=True)
    adding = [_addition(file) for file in upload.files]
    files = {path: hashes for path, hashes in uploaded.items() if path not in upload.removed}
    for file, addition in zip(upload.files, adding, strict=True):
        git = git_hash(file.read()) if file.size <= _MAX_IN_GIT else ""
        files[file.path] = addition.upload_info.sha256.hex(), git
    marker = {
        "format": FORMAT,
        "version": 1,
        "source": source,
        "files": dict(sorted(files.items())),
    }
    adding.append(_addition(LocalFile(MARKER, (json.dumps(marker, indent=2) + "\n").encode())))
    # huggingface_hub 2.4 sends equal files of one commit, such as of two checkpoints, once each
    each_once = {addition.upload_info.sha256: addition for addition in adding}
    api.preupload_lfs_files(name, list(each_once.values()), free_memory=False)
    api.create_commit(
        name,
        [*adding, *(CommitOperationDelete(path_in_repo=path) for path in upload.removed)],
        commit_message="Upload with Surefoot",
        # The hub refuses the commit if somebody else has made one since the look.
        parent_commit=None if there is None else there.commit or None,
    )


def _addition(file: LocalFile) -> CommitOperationAdd:
    source = file.source if isinstance(file.source, bytes) else str(file.source)
    return CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=source)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of the library, in one sentence."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
        # threads that upload raise a RuntimeError, whose cause says more
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        answer = ""
        if isinstance(cause, HfHubHTTPError):
            answer = cause.server_message or cause.response.text[:200].strip()
        if isinstance(cause, LocalTokenNotFoundError) or status in (401, 403):
            # 403 is also the answer to a full quota, a gated model, a blocked account
            message = (
                f"{name}: the hub refuses the upload{answer and f' ({status}: {answer})'}; if the "
                "token is the reason, set HF_TOKEN to one with write access, or run `hf auth login`"
            )
        elif isinstance(cause, HfHubHTTPError):
            message = f"{name}: the hub answers {status}: {answer}"
        elif isinstance(cause, HTTPError | OSError):
            reason = str(cause) or type(cause).__name__
            message = (
                f"{constants.ENDPOINT}: connection lost ({reason}); the same command continues "
                "the upload"
            )
        else:
            message = f"{name}: {first_line(error)}"
        raise HubError(message) from error
