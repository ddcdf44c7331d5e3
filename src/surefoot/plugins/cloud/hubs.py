"""Downloads of Hugging Face and of ModelScope, by their packages, resumed and verified.

huggingface_hub begins a file again when its process was killed, and compares lengths alone. So
files are downloaded to its cache first, where it finds them. The cache names them by the sha256
that the hub announces, or by their hash in git if they are small. Every file is hashed once,
whoever has downloaded it. ModelScope's package resumes and verifies; by hand, no file leaves its
folder, and a machine without a network uses only what was downloaded completely.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    filter_repo_objects,
)

from ...errors import first_line, installation
from ...log import fell_back
from ...storage import files
from ...storage.remote import (
    DOWNLOAD,
    HubError,
    Kind,
    default_cache,
    digest_of,
    locked,
    offline_setting,
)

logger = logging.getLogger(__name__)
LOST = (ConnectionError, TimeoutError, socket.gaierror)
_HASH = re.compile("[0-9a-f]+")
_KINDS = {64: "sha256", 40: "sha1"}  # by the length of a name: the second of git
_Filters = dict[str, Any]  # allow_patterns and ignore_patterns, as huggingface_hub calls them


class HuggingFaceHub:
    """Models and datasets of the Hugging Face hub, or of the mirror in HF_ENDPOINT."""

    def snapshot(
        self,
        kind: Kind,
        name: str,
        *,
        revision: str | None = None,
        patterns: Sequence[str] = ("*",),
        ignored: Sequence[str] = (),
    ) -> Path:
        """The local folder of a model or a dataset; see ``HubClient``."""
        filters: _Filters = {"allow_patterns": list(patterns), "ignore_patterns": list(ignored)}
        repo_type = kind.removesuffix("s")
        load = partial(snapshot_download, name, repo_type=repo_type, revision=revision, **filters)
        try:
            if offline_setting() is None:
                _prefetch(kind, name, revision, filters)
            folder = Path(load())
            if not (damaged := list(_damaged(folder))):
                return folder
            for path, mismatch in damaged:
                logger.warning("%s: %s; downloading it again", path.name, mismatch)
                _remove(path)
            folder = Path(load())
            for path, mismatch in _damaged(folder):
                _remove(path)
                raise HubError(
                    f"{path.name}: {mismatch}; it was removed. The file on the hub, or a proxy on "
                    "the way, is damaged"
                )
            return folder
        except HFValidationError:
            raise HubError("it is not a hub id such as Qwen/Qwen3-0.6B") from None
        except (HTTPError, LocalEntryNotFoundError, OSError) as error:
            why = _why_not_reached(error)
            raise HubError(f"the Hugging Face hub did not return it: {why}") from None


def _prefetch(kind: Kind, name: str, revision: str | None, filters: _Filters) -> None:
    """Download the files of a repository to the library's cache, which names them by their hash.
    Raises ``HubError``: a file arrives damaged; errors of the library."""
    api = HfApi(endpoint=constants.ENDPOINT)
    info_of = api.model_info if kind == "models" else api.dataset_info
    try:
        repository = info_of(name, revision=revision, files_metadata=True)
    except (HTTPError, OSError) as error:
        if offline_setting() is None:  # which asks for no more
            what = f"{name}: the copy on this machine is used, if there is one"
            fell_back(what, _why_not_reached(error), "may be older than what is on the hub now")
        return
    listed = {each.rfilename: each for each in repository.siblings or ()}
    cache = Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "blobs"
    # Two processes would append to the same part.
    with locked(default_cache().with_name("hub") / kind / name):
        for path in sorted(filter_repo_objects(listed, **filters)):
            size, lfs, git = listed[path].size, listed[path].lfs, listed[path].blob_id
            hash_ = lfs.sha256 if lfs is not None else git
            if hash_ is None or size is None or (cache / hash_).exists():
                continue
            if size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # which is left to Xet
                continue
            # The commit that was listed: `main` may move in the meantime.
            url = hf_hub_url(name, path, repo_type=kind.removesuffix("s"), revision=repository.sha)
            logger.info("downloading %s of %s: %d bytes", path, name, size)
            hash_name = "sha256" if lfs is not None else "hash in git"
            # By hand, since snapshot_download of huggingface_hub 2.4 writes to a random name,
            # and so begins a killed download again (decisions/0078).
            if (digest := _download(url, cache / hash_, size)) is not None:
                mismatch = f"{path}: its {hash_name} is {digest}, expected {hash_}"
                logger.warning("%s; downloading it again", mismatch)
                if (digest := _download(url, cache / hash_, size)) is not None:
                    raise HubError(
                        f"{path}: its {hash_name} is {digest}, expected {hash_}; nothing was "
                        "kept: the file on the hub, or a proxy on the way, is damaged"
                    )


def _download(url: str, blob: Path, size: int) -> str | None:
    """Download a file, or continue what a killed process has begun. The hash that it has, if it is
    not that of its name; then nothing is kept."""
    part = blob.with_name(f"{blob.name}.part")
    with files.raising(HubError, f"cannot write to {blob.parent}"):
        files.make_folder(blob.parent)
    with files.open_log(part) as file:
        if file.tell() > size:  # of a server that sent too much, and would refuse to continue it
            file.truncate(0)
        http_get(
            url,
            file,
            resume_size=part.stat().st_size,
            headers=build_hf_headers(),
            expected_size=size,
            displayed_filename=blob.name,
        )
    if (digest := _digest(part, _KINDS[len(blob.name)])) != blob.name:
        part.unlink()
        return digest
    part.replace(blob)
    _mark_verified(blob)
    return None


def _damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    """Links to files of the cache whose content is not what their name says."""
    for path in sorted(link for link in folder.rglob("*") if link.is_symlink() and link.is_file()):
        blob = path.resolve()
        kind = _KINDS.get(len(blob.name)) if _HASH.fullmatch(blob.name) else None
        if kind is None or _mark_of(blob).exists():
            continue
        if (digest := _digest(blob, kind)) != blob.name:
            yield path, f"its hash is {digest}, expected {blob.name}"
        else:
            _mark_verified(blob)


def _digest(path: Path, kind: str) -> str:
    # git hashes this line before the content.
    return digest_of(path, kind, b"blob %d\0" % path.stat().st_size if kind == "sha1" else b"")


def _mark_of(blob: Path) -> Path:
    """An empty file that says of a file, as it is now, that it was verified."""
    status = blob.stat()
    name = f"{blob.name}-{status.st_size}-{status.st_mtime_ns}"
    return default_cache().with_name("verified") / name


def _mark_verified(blob: Path) -> None:
    mark = _mark_of(blob)
    with contextlib.suppress(OSError):  # without a mark, it is hashed again the next time
        files.make_folder(mark.parent)
        mark.touch()


def _remove(path: Path) -> None:
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _why_not_reached(error: Exception) -> str:
    """Why the library could not download something, in one sentence."""
    message = first_line(error)
    if (name := offline_setting()) is not None:
        return f"it is not on this machine, and {name} is set; unset it, {DOWNLOAD}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LOST):
            reason = getattr(cause, "strerror", None) or str(cause)
            message = f"{constants.ENDPOINT} cannot be reached ({reason}); check the network, "
            message += DOWNLOAD
        cause = cause.__cause__ or cause.__context__
    return message


HUGGING_FACE = HuggingFaceHub()


class ModelScope:
    """Models and datasets of ModelScope, or of the mirror in MODELSCOPE_ENDPOINT."""

    def snapshot(
        self,
        kind: Kind,
        name: str,
        *,
        revision: str | None = None,
        patterns: Sequence[str] = ("*",),
        ignored: Sequence[str] = (),
    ) -> Path:
        """The local folder of a model or a dataset; see ``HubClient``."""
        try:
            import modelscope_hub
        except ImportError:
            raise HubError(
                f"{name} is of ModelScope, whose package is missing; "
                f"{installation('modelscope_hub')}, or download it with another program, and name "
                "the folder"
            ) from None
        complete = _Complete(f"{kind} {name} {revision}", frozenset(patterns), frozenset(ignored))
        if (setting := offline_setting()) is not None:
            return complete.folder(
                f"{name} of ModelScope is not on this machine, and {setting} is set; unset "
                f"{setting}, {DOWNLOAD}"
            )
        api = modelscope_hub.HubApi(modelscope_hub.HubConfig())
        repo_type = kind.removesuffix("s")
        try:
            listed = api.list_repo_files(name, repo_type, revision=revision)
            for each in listed:
                # modelscope-hub 0.5.1 writes `../../outside` of a listing outside of its folder
                # (decisions/0078).
                if ".." in (path := PurePosixPath(each.path)).parts or path.is_absolute():
                    raise HubError(f"{name} of ModelScope: {each.path!r} is outside of its folder")
            entries = [
                {"Path": each.path, "Size": each.size, "Sha256": each.sha256, "Type": each.type}
                for each in listed
            ]
            folder: Path = api.download_repo(
                name,
                repo_type,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                file_list=entries,
            )
        except modelscope_hub.NetworkError as error:
            why = f"ModelScope cannot be reached ({error})"
            folder = complete.folder(f"{why}; check the network, {DOWNLOAD}")
            fell_back(f"{name}: read from {folder}", why, "may be older than what is there now")
            return folder
        except modelscope_hub.NotExistError:
            raise HubError(
                f"ModelScope has no {name}, or not this revision; expected owner/name"
            ) from None
        except (modelscope_hub.AuthenticationError, modelscope_hub.PermissionDeniedError):
            raise HubError(
                f"ModelScope refuses {name}; set MODELSCOPE_API_TOKEN to a token of an account "
                "that may read it"
            ) from None
        except (modelscope_hub.HubError, OSError, ValueError) as error:
            raise HubError(f"{name} of ModelScope: {error}") from None
        # Without a network, the package returns half a snapshot as if it were complete.
        complete.note(folder)
        return folder


@dataclass(frozen=True)
class _Complete:
    """Downloads of a repository that have ended, noted in the cache of Surefoot. One serves whoever
    wants the same files or fewer: ``preview`` needs no weights, and ``download`` gets all."""

    repository: str
    patterns: frozenset[str]
    ignored: frozenset[str]

    def folder(self, missing: str) -> Path:
        """The folder. Raises ``HubError`` with ``missing``."""
        for download in self._downloads().get(self.repository, []):
            has_all = "*" in download["patterns"] or self.patterns <= {*download["patterns"]}
            folder = Path(download["folder"])
            if has_all and {*download["ignored"]} <= self.ignored and folder.is_dir():
                return folder
        raise HubError(missing)

    def note(self, folder: Path) -> None:
        """Note that ``folder`` has all that was wanted."""
        download = {
            "folder": str(folder),
            "patterns": sorted(self.patterns),
            "ignored": sorted(self.ignored),
        }
        downloads = self._downloads()
        others = [other for other in downloads.get(self.repository, []) if other != download]
        data = json.dumps({**downloads, self.repository: [*others, download]}).encode()
        with files.raising(HubError, f"cannot write {self._path}"):
            files.make_folder(self._path.parent)
            files.write_aside(self._path, data)

    @property
    def _path(self) -> Path:
        return default_cache().with_name("modelscope-downloads.json")

    def _downloads(self) -> dict[str, list[dict[str, Any]]]:
        try:
            return dict(files.read_json(self._path))
        except (OSError, ValueError, TypeError):
            return {}


MODELSCOPE = ModelScope()
