"""Rows of files on a server (``https://``, ``s3://``, ``gs://`` and other addresses), and of
datasets of the Hugging Face hub and of ModelScope.

Files are downloaded to the cache through fsspec, resumed and verified by their length, and read
there. A file is downloaded again when its server says that it has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from ...errors import DataError, installation
from ...log import fell_back
from ...schema.locations import DATA_FILES
from ...storage import files
from ...storage.remote import (
    CHUNK,
    HUBS,
    Address,
    HubError,
    check_online,
    default_cache,
    locked,
    offline_setting,
)
from ..example import BrokenRow
from ._readers import ROWS, TextUnit, rows_of
from ._row_sources import Files, split_of
from .formats.fields import Row

if TYPE_CHECKING:
    import pyarrow as pa


logger = logging.getLogger(__name__)
HTTP = ("http", "https")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
# For a web server, the proxies of the environment; public buckets are read without credentials, if
# there are none.
OPTIONS: Mapping[bool, Sequence[Mapping[str, Any]]] = {
    True: ({"client_kwargs": {"trust_env": True}},),
    False: ({}, {"anon": True}),
}
TAGS = ("ETag", "etag", "LastModified", "Last-Modified")  # tell versions of a file apart
LISTED = "files.json"  # names and hashes of the copies that were complete when the server was asked
NOT_NEEDED = ("*.py", ".git*")  # scripts are not run
ADDRESS = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<revision>[0-9a-f]{40})/(?P<path>.+)")
SCRIPTS = "Dataset scripts are no longer supported"
HubName = Literal["huggingface", "modelscope"]


def remote_files(address: Address, text_unit: TextUnit = "file") -> Files:
    """A file on a server, or the files of a folder in an object store. Raises ``DataError``: they
    cannot be downloaded."""
    folder = default_cache().with_name("files") / address.slug
    try:
        with locked(folder):
            return Files(tuple(_copies(address, folder)), (), text_unit, str(address))
    except HubError as error:
        raise DataError(f"cannot read {address}: {error}") from None


def _copies(address: Address, folder: Path) -> list[Path]:
    """The local copies of a file, or of the files of a folder, in the order of their names: up to
    date as far as the server can be reached."""
    known = files.read_json(folder / LISTED) if (folder / LISTED).exists() else {}
    hashes: Mapping[str, str] = known if isinstance(known, dict) else dict.fromkeys(known, "")
    damaged = [folder / name for name, digest in hashes.items() if not _is(folder / name, digest)]
    for path in damaged:
        logger.warning("%s: its copy %s is damaged or gone; downloading it again", address, path)
        path.unlink(missing_ok=True)
    local_copies = [] if damaged else [folder / name for name in hashes]
    if offline_setting() is not None:
        if not local_copies:
            check_online(str(address))
        return local_copies
    try:
        store, listed = _listed(address)
    except HubError as error:
        if not local_copies:
            raise
        what = f"{address}: the copy of before is read"
        fell_back(what, str(error), "may be older than what is there now")
        return local_copies
    paths = [folder / f"{n:05d}-{_version(e)}-{_name(e)}" for n, e in enumerate(listed)]
    for entry, path in zip(listed, paths, strict=True):
        if not path.exists():
            _copy(store, entry, path)
    hashes = {path.name: hashes.get(path.name) or Files((path,)).content_hash() for path in paths}
    files.write_aside(folder / LISTED, json.dumps(hashes).encode())
    return paths


def _is(path: Path, digest: str) -> bool:
    """Whether a copy is what arrived, as far as that is known."""
    return path.is_file() and digest in ("", Files((path,)).content_hash())


def _listed(address: Address) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """The store, and the files that an address means."""
    import fsspec

    is_web = address.scheme in HTTP
    if is_web and _kind({"name": str(address)}) not in DATA_FILES:
        kind_names = ", ".join(kind[1:] for kind in DATA_FILES)
        raise HubError(f"expected a file of one of the kinds {kind_names}")
    failures = []
    for options in OPTIONS[is_web]:
        try:
            store, path = fsspec.core.url_to_fs(str(address), **options)
            info = store.info(path)
            entries = [info] if info["type"] == "file" else store.ls(path, detail=True)
        except ImportError:
            package = PACKAGES.get(address.scheme, "the package of this store")
            raise HubError(f"a package is missing; {installation(package)}") from None
        except Exception as error:  # of any library of a store
            failures.append(_said(error))
            continue
        rows = [entry for entry in entries if _kind(entry) in DATA_FILES]
        splits = {split_of(_name(entry)) for entry in rows}
        default_split = "train" if "train" in splits else None  # the same as of a folder here
        if default_split in splits:
            rows = [entry for entry in rows if split_of(_name(entry)) == default_split]
        kinds = {_kind(entry) for entry in rows}
        if len(kinds) != 1:
            raise HubError(f"expected files of one kind, found {', '.join(sorted(kinds)) or None}")
        return store, sorted(rows, key=lambda entry: str(entry["name"]))
    raise HubError(failures[0])


def _copy(store: Any, entry: Mapping[str, Any], path: Path) -> None:
    """Download a file, after what an interrupted call has left of it."""
    part, size, name = path.with_name(f"{path.name}.part"), entry["size"], entry["name"]
    try:
        if size is not None and part.exists() and entry.get("partial", True):
            with files.open_log(part) as opened:
                while (start := opened.tell()) < size:
                    end = min(start + 16 * CHUNK, size)
                    data = store.cat_file(name, start=start, end=end)
                    if len(data) != end - start:  # a server that always sends all of it
                        break
                    opened.write(data)
        if not part.exists() or part.stat().st_size != size:
            store.get_file(name, str(part))
        store.invalidate_cache()
        current_entry = store.info(name)
    except Exception as error:  # of any library of a store
        raise HubError(f"{_said(error)}; start again to resume") from error
    if size not in (None, length := part.stat().st_size):
        part.unlink()
        raise HubError(f"{length:,} bytes arrived, expected {size:,}; start again")
    if _version(current_entry) != _version(entry):  # its parts may be of two versions
        part.unlink()
        raise HubError(f"{name} was replaced while it was downloaded; start again")
    part.replace(path)


def _version(entry: Mapping[str, Any]) -> str:
    """What tells one version of a file from another."""
    tags = [str(entry[tag]) for tag in TAGS if tag in entry]
    text = json.dumps([entry["name"], entry["size"], tags])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _name(entry: Mapping[str, Any]) -> str:
    """The name of a file, without what follows it in the address of a web page."""
    return PurePosixPath(entry["name"].partition("?")[0].partition("#")[0]).name


def _kind(entry: Mapping[str, Any]) -> str:
    return PurePosixPath(_name(entry)).suffix.lower()


def _said(error: Exception) -> str:
    """An error of a library; where it hides what the server has said, that."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub (or a local folder in its form), or of ModelScope."""

    hub: HubName
    url: str
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    remarks: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"{self.url} ({self.hub})"

    @property
    def as_entry(self) -> str:
        """What names it in an entry."""
        return f"{'ms' if self.hub == 'modelscope' else 'hf'}_hub_url: {self.url}"

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if the dataset cannot be loaded."""
        index = 0
        with files.reading(DataError, lambda: f"dataset {self}: row {index}"):
            for table in self._loaded.with_format("arrow").iter(batch_size=ROWS):
                for row in chain.from_iterable(map(rows_of, table.to_batches())):
                    yield BrokenRow(index, row) if isinstance(row, str) else row
                    index += 1

    def places(self, numbers: Collection[int]) -> dict[int, str]:
        """The number of each of these rows, of which the first is 0."""
        return {number: f"{self}: row {number}" for number in numbers}

    def content_hash(self) -> str:
        """The hub library's own fingerprint of what it loaded."""
        return self._loaded._fingerprint

    def stamp(self) -> str:
        """The same: a loaded dataset does not change any more."""
        return self.content_hash()

    @cached_property
    def _loaded(self) -> _HubDataset:
        """The split, as the library of Hugging Face loads it."""
        import datasets

        try:
            dataset: _HubDataset = datasets.load_dataset(
                _downloaded(self), name=self.subset, data_dir=self.folder, split=self.split
            )
        except HubError as error:
            raise DataError(f"cannot load dataset {self}: {error}") from None
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise _not_loaded(self, error) from error
        return dataset


class _HubDataset(Protocol):
    _fingerprint: str

    def with_format(self, form: str, /) -> _HubDataset: ...

    def iter(self, batch_size: int) -> Iterator[pa.Table]: ...


def _downloaded(source: Hub) -> str:
    """What the library is to load. Of a dataset that is not prepared yet, the files are downloaded
    and verified before the library may read them."""
    import datasets

    if source.hub == "modelscope":  # as a folder in the form of a hub
        inside = f"{source.folder.strip('/')}/*" if source.folder else "*"
        patterns = (inside, "README.md")
        return str(
            HUBS["modelscope"].snapshot(
                "datasets", source.url, patterns=patterns, ignored=NOT_NEEDED
            )
        )
    if Path(source.url).exists():
        return source.url
    if not (Path(datasets.config.HF_DATASETS_CACHE) / source.url.replace("/", "___")).exists():
        check_online("it")
        _check_address(urlsplit(datasets.config.HF_ENDPOINT).hostname)
    builder = datasets.load_dataset_builder(source.url, name=source.subset, data_dir=source.folder)
    files_of_splits = (builder.config.data_files or {}).values()
    urls = [unquote(str(url)) for split_files in files_of_splits for url in split_files]
    places = [place for url in urls if (place := ADDRESS.fullmatch(url))]
    if places and not Path(builder.cache_dir).exists():
        name, revision = places[0]["name"], places[0]["revision"]
        paths = [place["path"] for place in places if place["name"] == name]
        HUBS["huggingface"].snapshot("datasets", name, revision=revision, patterns=paths)
    return source.url


def _check_address(host: str | None) -> None:
    """Raises ``OSError`` if the host has no address here: the library would try again and again for
    half a minute. Where there is a proxy, it is the one that looks addresses up."""
    if not getproxies():
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise OSError(f"{host}: {error.strerror}") from error


def _not_loaded(source: Hub, error: Exception) -> DataError:
    hint = "check its name, subset, split and folder, and the network"
    if SCRIPTS in str(error):
        hint = "its rows are made by a script, which is not run; convert it to JSON or Parquet"
    return DataError(f"cannot load dataset {source}: {error}; {hint}")
