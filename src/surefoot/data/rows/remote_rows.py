"""Rows of files on a server: ``https://``, ``s3://``, ``gs://`` and other addresses.

A file is downloaded to the cache, resumed and verified by its length, and read there. It is
downloaded again when its server says that it has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPMessage
from pathlib import Path
from typing import Any

from ...errors import DataError, installation
from ...schema.locations import DATA_FILES
from ...storage import files
from ...storage.address import Address, default_cache
from ...storage.files import read_json
from ...storage.hubs.file_download import (
    CHUNK,
    HubError,
    NotReachedError,
    RemoteFile,
    check_online,
    download,
    locked,
    offline_setting,
    request,
    tag_of,
)
from .formats.fields import Row
from .readers import TextUnit
from .row_sources import BrokenRow, Files, split_of

logger = logging.getLogger(__name__)
HTTP = ("http", "https")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
NO_HEAD = (403, 405, 501)  # HTTP status
INFO = "file.json"  # what the server said about the file


@dataclass(frozen=True)
class RemoteFiles:
    """A file on a server, or the files of a folder in an object store."""

    address: Address
    text_unit: TextUnit = "file"

    @property
    def as_entry(self) -> str:
        """What names it in an entry."""
        return f"file_name: {self.address}"

    def __str__(self) -> str:
        return str(self.address)

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if the file cannot be downloaded or read."""
        yield from self._local.rows()

    def content_hash(self) -> str:
        """Hash of the bytes of all files."""
        return self._local.content_hash()

    def stamp(self) -> str:
        """Changes when a file is downloaded again."""
        return self._local.stamp()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is not read of a folder."""
        return self._local.remarks

    @cached_property
    def _local(self) -> Files:
        folder = default_cache().with_name("files") / self.address.slug
        try:
            with locked(folder):
                if self.address.scheme in HTTP:
                    return Files((_over_http(self.address, folder),), (), self.text_unit)
                return Files(tuple(_from_store(self.address, folder)), (), self.text_unit)
        except HubError as error:
            raise DataError(f"cannot read {self.address}: {error}") from None


def _over_http(address: Address, folder: Path) -> Path:
    """The local copy of a file, up to date as far as its server can be reached."""
    known, url = _known(folder), str(address)
    path = folder / _name(address)
    is_here = path.exists() and known is not None
    if offline_setting() is not None:
        if not is_here:
            check_online(url)
        return path
    try:
        found = _about(url)
    except NotReachedError as error:
        if not is_here:
            raise
        logger.warning("%s; using the copy of before", error)
        return path
    if is_here and known == found:
        return path
    if known is not None and known != found:
        path.with_name(f"{path.name}.part").unlink(missing_ok=True)
    files.write_aside(folder / INFO, json.dumps({**found, "complete": False}).encode())
    download(RemoteFile(url, found["size"], tag=found["tag"]), path)
    files.write_aside(folder / INFO, json.dumps({**found, "complete": True}).encode())
    return path


def _about(url: str) -> dict[str, Any]:
    """Length, tag and time of a file, as its server says them. Some refuse HEAD, such as those of
    signed addresses: then the file is requested, and nothing of it is read."""
    try:
        said = _headers(url, "HEAD")
    except urllib.error.HTTPError as error:
        if error.code not in NO_HEAD:
            raise HubError(f"the server answers {error.code} {error.reason}") from error
        try:
            said = _headers(url, "GET")
        except urllib.error.HTTPError as again:
            raise HubError(f"the server answers {again.code} {again.reason}") from again
    size = said.get("Content-Length")
    is_plain = said.get("Content-Encoding", "identity") == "identity"
    return {
        "size": int(size) if size and is_plain else None,
        "tag": tag_of(said),
    }


def _headers(url: str, method: str) -> HTTPMessage:
    with request(url, {}, method) as answer:
        return answer.headers


def _known(folder: Path) -> dict[str, Any] | None:
    """What the server said about the file that was downloaded before."""
    try:
        found: dict[str, Any] = read_json(folder / INFO)
        return {"size": found["size"], "tag": found["tag"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _name(address: Address) -> str:
    """The name of the local copy, with the kind of file at its end."""
    name = address.name.partition("?")[0].partition("#")[0]
    if Path(name).suffix.lower() not in DATA_FILES:
        known = ", ".join(kind[1:] for kind in DATA_FILES)
        raise HubError(f"expected a file of one of the kinds {known}")
    return name


def _from_store(address: Address, folder: Path) -> Iterator[Path]:
    """The local copies of a file, or of the files of a folder, in the order of their names."""
    if offline_setting() is not None:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in DATA_FILES)
        if not found:
            check_online(str(address))
        yield from found
        return
    store, listed = _listed(address)
    for number, entry in enumerate(listed):
        digest = hashlib.sha256(_traces(entry).encode()).hexdigest()[:12]
        name = entry["name"].rpartition("/")[2]
        path = folder / f"{number:05d}-{digest}-{name}"
        if not path.exists():
            _copy(store, entry, path)
        yield path


def _traces(entry: Mapping[str, Any]) -> str:
    """What tells one version of a file in a store from another."""
    tag = f"{entry.get('ETag') or entry.get('etag')} {entry.get('LastModified', '')}"
    return json.dumps([entry["name"], entry["size"], tag])


def _listed(address: Address) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """The store, and the files that an address means. Public ones are read without credentials,
    if there are none."""
    import fsspec

    failures = []
    for options in ({}, {"anon": True}):
        try:
            store, path = fsspec.core.url_to_fs(str(address), **options)
            info = store.info(path)
            found = [info] if info["type"] == "file" else store.ls(path, detail=True)
        except ImportError:
            package = PACKAGES.get(address.scheme, "the package of this store")
            raise HubError(f"a package is missing; {installation(package)}") from None
        except Exception as error:  # of any library of a store
            failures.append(f"{type(error).__name__}: {error}")
            continue
        rows = [e for e in found if Path(e["name"]).suffix.lower() in DATA_FILES]
        splits = {split_of(e["name"].rpartition("/")[2]) for e in rows}
        if "train" in splits:  # the same as of a folder here
            rows = [e for e in rows if split_of(e["name"].rpartition("/")[2]) == "train"]
        elif None in splits:
            rows = [e for e in rows if split_of(e["name"].rpartition("/")[2]) is None]
        kinds = {Path(entry["name"]).suffix.lower() for entry in rows}
        if len(kinds) != 1:
            raise HubError(f"expected files of one kind, found {', '.join(sorted(kinds)) or None}")
        return store, sorted(rows, key=lambda entry: str(entry["name"]))
    raise HubError(failures[0])


def _copy(store: Any, entry: Mapping[str, Any], path: Path) -> None:
    """Download a file of a store, after what an interrupted call has left of it."""
    part, size = path.with_name(f"{path.name}.part"), int(entry["size"])
    with part.open("ab") as opened:
        while (start := opened.tell()) < size:
            stop = min(start + 16 * CHUNK, size)
            try:
                data = bytes(store.cat_file(entry["name"], start=start, end=stop))
            except Exception as error:  # of any library of a store
                raise HubError(f"{type(error).__name__}: {error}; start again to resume") from error
            if len(data) != stop - start:
                raise HubError(f"{len(data):,} bytes arrived, expected {stop - start:,}")
            opened.write(data)
    store.invalidate_cache()
    if _traces(store.info(entry["name"])) != _traces(entry):  # its parts may be of two versions
        part.unlink()
        raise HubError(f"{entry['name']} was replaced while it was downloaded; start again")
    part.replace(path)
