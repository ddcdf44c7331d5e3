"""ModelScope's hub: list the files of a model or a dataset, and download them.

Two requests of its HTTP API are enough, so its package is not needed. Downloads are stored where
that package stores them, so that each finds those of the other.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote_plus, urlencode

from .. import files
from ..files import read_json
from .file_download import (
    HubError,
    NotReachedError,
    RemoteFile,
    check_online,
    digest_of,
    download,
    locked,
    offline_setting,
    request,
)

logger = logging.getLogger(__name__)
ENDPOINT = "https://www.modelscope.cn"
INDEX = ".surefoot.json"  # sizes, times and hashes of files that were verified
PAGE = 200  # files of a dataset that are listed at a time
MOST = 3000  # files of a model that are listed; more are silently missing
SECRET = "m_session_id"  # the cookie that has the token
Kind = Literal["models", "datasets"]


def snapshot(
    kind: Kind,
    name: str,
    *,
    revision: str | None = None,
    patterns: Sequence[str] = ("*",),
    ignored: Sequence[str] = (),
) -> Path:
    """The folder with the files of a model or a dataset that match ``patterns``. Raises
    ``HubError``: it does not exist, cannot be reached, or arrives damaged."""
    folder = folder_of(kind, name, revision)
    with locked(folder):
        return _snapshot(kind, name, revision, (patterns, ignored), folder)


def _snapshot(
    kind: Kind,
    name: str,
    revision: str | None,
    chosen_by: tuple[Sequence[str], Sequence[str]],
    folder: Path,
) -> Path:
    (patterns, ignored), index = chosen_by, _Index(folder)
    wanted = f"{sorted(patterns)} {sorted(ignored)}"
    if offline_setting() is not None:
        if wanted not in index.complete:
            check_online(f"{name} of ModelScope")
        return folder
    try:
        listed = list(files_of(kind, name, revision or "master"))
    except NotReachedError as error:
        if wanted not in index.complete:
            raise
        logger.warning("%s; using the copy in %s", error, folder)
        return folder
    chosen = [each for each in listed if _is_wanted(each["Path"], patterns, ignored)]
    if not chosen:
        raise HubError(f"{name} of ModelScope has none of the files {', '.join(patterns)}")
    for each in chosen:
        _load(kind, name, revision or "master", each, index)
    index.finish(wanted)
    return folder


def folder_of(kind: Kind, name: str, revision: str | None) -> Path:
    """Where the files of a model or a dataset are stored."""
    root = os.environ.get("MODELSCOPE_CACHE", "")
    cache = Path(root) if root else Path.home() / ".cache" / "modelscope" / "hub"
    owner, _, last = name.partition("/")
    plain = last.replace(".", "___")  # as ModelScope's package names it
    return cache / kind / owner / (f"{plain}@{quote_plus(revision)}" if revision else plain)


def _is_wanted(path: str, patterns: Sequence[str], ignored: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, p) for p in patterns) and not any(
        fnmatch.fnmatch(path, p) for p in ignored
    )


def files_of(kind: Kind, name: str, revision: str) -> Iterator[Mapping[str, Any]]:
    """Path, size and sha256 of each file."""
    if kind == "models":
        found = _listing(f"models/{name}/repo/files", name, Revision=revision, Recursive="True")
        if len(found) >= MOST:
            raise HubError(
                f"{name} of ModelScope has {MOST} files or more, which its server does not list; "
                "download it with ModelScope's own package, and name the folder"
            )
        yield from found
        return
    page, found = 0, [{}] * PAGE
    while len(found) == PAGE:
        page += 1
        place = {"Revision": revision, "Root": "/", "Recursive": "True"}
        numbers = {"PageNumber": str(page), "PageSize": str(PAGE)}
        found = _listing(f"datasets/{name}/repo/tree", name, **place, **numbers)
        yield from found


def _listing(path: str, name: str, **parameters: str) -> list[Mapping[str, Any]]:
    """The files in an answer, without folders."""
    url = f"{endpoint()}/api/v1/{path}?{urlencode(parameters)}"
    try:
        with request(url, secrets()) as answer:
            said = json.loads(answer.read())
        listed = said["Data"]["Files"] or []
        return [each for each in listed if each.get("Type", "blob") != "tree" and each["Path"]]
    except urllib.error.HTTPError as error:
        raise _refused(name, error) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HubError(f"{url}: not an answer of ModelScope ({error!r})") from error


def _refused(name: str, error: urllib.error.HTTPError) -> HubError:
    if error.code in (401, 403):
        return HubError(
            f"ModelScope refuses {name} ({error.code}); set MODELSCOPE_API_TOKEN to a token of an "
            "account that may read it"
        )
    if error.code == 404:
        return HubError(f"ModelScope has no {name}, or not this revision; expected owner/name")
    return HubError(f"ModelScope answers {error.code} {error.reason} for {name}")


def _load(kind: Kind, name: str, revision: str, entry: Mapping[str, Any], index: _Index) -> None:
    """Download a file, unless it is there and verified."""
    path, size, sha256 = str(entry["Path"]), entry.get("Size"), entry.get("Sha256") or None
    place = index.folder / path
    if not place.resolve().is_relative_to(index.folder.resolve()):
        raise HubError(f"{name} of ModelScope: {path!r} is outside of its folder")
    if index.has(path, size, sha256):
        return
    query = urlencode({"Revision": revision, "FilePath": path})
    url = f"{endpoint()}/api/v1/{kind}/{name}/repo?{query}"
    download(RemoteFile(url, size, sha256, secrets()), place)
    index.add(path, sha256)


def endpoint() -> str:
    """The address of the hub."""
    return os.environ.get("MODELSCOPE_ENDPOINT", "").rstrip("/") or ENDPOINT


def secrets() -> Mapping[str, str]:
    """The headers that have the token."""
    token = os.environ.get("MODELSCOPE_API_TOKEN", "")
    return {"Authorization": f"Bearer {token}", "Cookie": f"{SECRET}={token}"} if token else {}


class _Index:
    """The verified files of a folder, and which downloads are complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            found = read_json(folder / INDEX)
            self._files: dict[str, list[Any]] = dict(found["files"])
            self.complete: list[str] = list(found["complete"])
        except (OSError, ValueError, KeyError, TypeError):
            self._files, self.complete = {}, []

    def has(self, path: str, size: int | None, sha256: str | None) -> bool:
        """Whether a file is there as it was verified. One that another program has downloaded is
        hashed once."""
        place = self.folder / path
        if not place.is_file():
            return False
        if [sha256, *_stamp(place)] == self._files.get(path):
            return True
        if size is not None and place.stat().st_size != size:
            return False
        if sha256 is None or digest_of(place) != sha256.lower():
            return False
        self.add(path, sha256)
        return True

    def add(self, path: str, sha256: str | None) -> None:
        """Note that a file is verified."""
        self._files[path] = [sha256, *_stamp(self.folder / path)]
        self._write()

    def finish(self, wanted: str) -> None:
        """Note that a download is complete."""
        if wanted not in self.complete:
            self.complete.append(wanted)
            self._write()

    def _write(self) -> None:
        found = {"files": self._files, "complete": self.complete}
        with files.raising(HubError, f"cannot write {self.folder / INDEX}"):
            files.write_aside(self.folder / INDEX, json.dumps(found).encode())


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
