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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    filter_repo_objects,
)

from .. import files
from ..address import default_cache
from ..files import read_json
from .file_download import (
    HubError,
    NotReachedError,
    RemoteFile,
    digest_of,
    download,
    locked,
    offline_setting,
    request,
)

logger = logging.getLogger(__name__)
LOST = (ConnectionError, TimeoutError, socket.gaierror)
LARGE = 1 << 20  # bytes; smaller files are left to the library
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


def prefetch(
    name: str,
    *,
    kind: str = "model",
    revision: str | None = None,
    patterns: Sequence[str] | None = None,
    ignored: Sequence[str] | None = None,
) -> None:
    """Download the large files of a repository that match ``patterns`` to the library's cache. What
    the hub refuses is left to the library. Raises ``HubError``: a file arrives damaged."""
    if offline_setting() is not None or (found := _about(name, kind, revision)) is None:
        return
    commit, listed = found
    cache = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "blobs"
    chosen = filter_repo_objects(
        listed,
        allow_patterns=None if patterns is None else list(patterns),
        ignore_patterns=None if ignored is None else list(ignored),
    )
    with locked(default_cache().with_name("hub") / kind / name):
        for path in sorted(chosen):
            size, sha256 = listed[path]
            if size < LARGE or (cache / sha256).exists():
                continue
            url = hf_hub_url(name, path, repo_type=kind, revision=commit)
            logger.info("downloading %s of %s: %d bytes", path, name, size)
            download(RemoteFile(url, size, sha256, build_hf_headers()), cache / sha256)


def _about(
    name: str, kind: str, revision: str | None
) -> tuple[str, dict[str, tuple[int, str]]] | None:
    """The commit of a revision, and length and sha256 of its large files; None if the hub does not
    say."""
    at = f"{constants.ENDPOINT}/api/{kind}s/{quote(name)}/revision/{quote(revision or 'main', '')}"
    try:
        with request(f"{at}?blobs=true", build_hf_headers()) as answer:
            said = json.loads(answer.read())
        large = {each["rfilename"]: each["lfs"] for each in said["siblings"] if each.get("lfs")}
        files_of = {path: (int(lfs["size"]), str(lfs["sha256"])) for path, lfs in large.items()}
        return str(said["sha"]), files_of
    except (NotReachedError, OSError, ValueError, KeyError, TypeError):
        return None


def download_verified(load: Callable[[], Path]) -> Path:
    """The folder that ``load`` downloads to, or has downloaded before, once all of its files are
    verified. A damaged file is removed, and downloaded again once. Raises ``HubError``."""
    folder = load()
    for path, wrong in list(_damaged(folder)):
        logger.warning("%s: %s; downloading it again", path.name, wrong)
        _remove(path)
    folder = load()
    for path, wrong in list(_damaged(folder)):
        _remove(path)
        raise HubError(
            f"{path.name}: {wrong}; it was removed. The file on the hub, or a proxy on the way, is "
            "damaged"
        )
    return folder


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


def _remove(path: Path) -> None:
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


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


def why_not_reached(error: Exception) -> str:
    """Why the library could not download something, in one sentence."""
    lines: Iterable[str] = str(error).strip().splitlines()
    reason = next(iter(lines), type(error).__name__)
    if (name := offline_setting()) is not None:
        return f"it is not on this machine, and {name} is set"
    causes = list(_causes(error))
    lost = [each for each in causes if isinstance(each, LOST)]
    if lost:
        reason = getattr(lost[-1], "strerror", None) or str(lost[-1])
        return f"{constants.ENDPOINT} cannot be reached ({reason}); check the network"
    return reason


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
