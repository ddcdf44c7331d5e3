"""Downloads of huggingface_hub that are resumed after a kill, and verified.

The library begins a file again when its process was killed, and compares lengths alone. So large
files are downloaded to its cache first, where it finds them; and every file is hashed once: the
cache names it by the sha256 that the hub announces, or by its hash in git if it is small.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

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

from ...errors import first_line
from ...storage import files
from ...storage.address import default_cache
from ...storage.files import read_json
from ...storage.hubs import HubError, Kind, digest_of, locked, offline_setting

logger = logging.getLogger(__name__)
LOST = (ConnectionError, TimeoutError, socket.gaierror)
LARGE = 1 << 20  # bytes; smaller files are left to the library
_Chosen = tuple[list[str], list[str]]  # patterns, and those of what is ignored
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


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
        """The local folder of a model or a dataset; a damaged file is removed, and downloaded again
        once."""
        chosen = list(patterns), list(ignored)
        for is_last in (False, True):
            try:
                if offline_setting() is None:
                    _prefetch(kind, name, revision, chosen)
                folder = Path(
                    snapshot_download(
                        name,
                        repo_type=kind.removesuffix("s"),
                        revision=revision,
                        allow_patterns=chosen[0],
                        ignore_patterns=chosen[1],
                    )
                )
            except HFValidationError:
                raise HubError("it is not a hub id such as Qwen/Qwen3-0.6B") from None
            except (HTTPError, LocalEntryNotFoundError, OSError) as error:
                why = _why_not_reached(error)
                raise HubError(f"the Hugging Face hub did not return it: {why}") from None
            damaged = list(_damaged(folder))
            for path, _ in damaged:
                blob = path.resolve()
                path.unlink(missing_ok=True)
                blob.unlink(missing_ok=True)
            if not damaged:
                return folder
            path, wrong = damaged[0]
            if not is_last:
                logger.warning("%s: %s; downloading it again", path.name, wrong)
        raise HubError(_damaged_text(path.name, wrong))


def _damaged_text(name: str, wrong: str) -> str:
    return (
        f"{name}: {wrong}; it was removed. The file on the hub, or a proxy on the way, is damaged"
    )


def _prefetch(kind: Kind, name: str, revision: str | None, chosen: _Chosen) -> None:
    """Download the large files of a repository to the library's cache. Raises ``HubError``: a file
    arrives damaged; errors of the library."""
    repo_type = kind.removesuffix("s")
    try:
        api = HfApi(endpoint=constants.ENDPOINT)
        about = api.model_info if kind == "models" else api.dataset_info
        found = about(name, revision=revision, files_metadata=True)
    except (HTTPError, OSError):  # what is on this machine may be enough
        return
    large = {
        each.rfilename: each.lfs
        for each in found.siblings or ()
        if each.lfs is not None and LARGE <= each.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    }
    cache = Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "blobs"
    with locked(default_cache().with_name("hub") / kind / name):
        for path in sorted(
            filter_repo_objects(large, allow_patterns=chosen[0], ignore_patterns=chosen[1])
        ):
            size, sha256 = large[path].size, large[path].sha256
            if (blob := cache / sha256).exists():
                continue
            url = hf_hub_url(name, path, repo_type=repo_type, revision=found.sha)
            with files.raising(HubError, f"cannot write to {cache}"):
                files.make_folder(cache)
            for is_last in (False, True):
                part = cache / f"{sha256}.part"
                with part.open("ab") as file:  # what a killed process has begun
                    logger.info("downloading %s of %s: %d bytes", path, name, size)
                    http_get(
                        url,
                        file,
                        resume_size=part.stat().st_size,
                        headers=build_hf_headers(),
                        expected_size=size,
                    )
                if (wrong := digest_of(part)) == sha256:
                    part.replace(blob)
                    break
                part.unlink()
                if is_last:
                    raise HubError(_damaged_text(path, f"its sha256 is {wrong}, expected {sha256}"))
                logger.warning("%s arrived damaged; downloading it again", path)


def _damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files whose content is not what their name in the cache says. Each is hashed once."""
    known = _Verified(folder)
    links = (path for path in folder.rglob("*") if path.is_symlink() and path.is_file())
    for path in sorted(links):
        blob = path.resolve()
        if known.has(blob):
            continue
        wrong = _wrong(blob)
        if wrong is None:
            known.add(blob)
        else:
            yield path, wrong
    known.write()


def _wrong(blob: Path) -> str | None:
    if _SHA256.fullmatch(blob.name):
        found = digest_of(blob)
    elif _GIT.fullmatch(blob.name):
        found = digest_of(blob, "sha1", f"blob {blob.stat().st_size}\0".encode())
    else:
        return None
    return None if found == blob.name else f"its hash is {found}, expected {blob.name}"


class _Verified:
    """Names, lengths and times of verified files of a repository, in the cache of Surefoot."""

    def __init__(self, folder: Path) -> None:
        name = hashlib.sha256(str(folder.resolve().parent).encode()).hexdigest()[:24]
        self._path = default_cache().with_name("verified") / f"{name}.json"
        try:
            self._known = set(read_json(self._path))
        except (OSError, ValueError, TypeError):
            self._known = set()
        self._is_changed = False

    def has(self, blob: Path) -> bool:
        """Whether a file is as it was when it was verified."""
        return _trace(blob) in self._known

    def add(self, blob: Path) -> None:
        """Note that a file is verified."""
        self._known.add(_trace(blob))
        self._is_changed = True

    def write(self) -> None:
        """Keep it. A cache that cannot be written to costs time only: files are hashed again."""
        if not self._is_changed:
            return
        try:
            files.make_folder(self._path.parent)
            files.write_aside(self._path, json.dumps(sorted(self._known)).encode())
        except OSError as error:
            logger.info("cannot keep which files are verified: %s", error)


def _trace(blob: Path) -> str:
    status = blob.stat()
    return f"{blob.name}:{status.st_size}:{status.st_mtime_ns}"


def _why_not_reached(error: Exception) -> str:
    """Why the library could not download something, in one sentence."""
    said = first_line(error)
    if (name := offline_setting()) is not None:
        return f"it is not on this machine, and {name} is set"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LOST):
            reason = getattr(cause, "strerror", None) or str(cause)
            said = f"{constants.ENDPOINT} cannot be reached ({reason}); check the network"
        cause = cause.__cause__ or cause.__context__
    return said


HUGGING_FACE = HuggingFaceHub()
