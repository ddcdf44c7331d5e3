"""A folder in an object store. All calls of fsspec are here, retried if that is useful."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path
from typing import Any

from ..errors import installation
from ..log import announced
from ..storage.address import Address
from .retry import RetryPolicy, StoreError, status_of

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # of each scheme
_S3 = ("s3", "s3a")
_FLAT = {*_S3, "gs", "gcs", "abfs", "abfss", "az", "adl", "memory", "oss", "r2", "tos"}
PRECONDITION_FAILED = 412  # HTTP: the file that must not exist does
_FEW = {"mode": "standard", "max_attempts": 2}  # by botocore; beyond that, ours
_PART = 16 << 20  # bytes of one part of a large file on its way


class Store:
    """The folder ``address``; names in it are relative. Methods raise ``StoreError``."""

    def __init__(self, address: Address, *, seconds: float = 600) -> None:
        self.address = address
        self._patience = RetryPolicy(seconds)
        self._files, self._root = _open(address)

    def list(self, below: str = "") -> dict[str, int]:
        """Every file in the folder (or in ``below``) with its length in bytes."""
        top = f"{self._root}/{below}".rstrip("/")

        def find() -> dict[str, Any]:
            self._files.invalidate_cache()
            try:
                return dict(self._files.find(top, detail=True))
            except FileNotFoundError as error:
                if "bucket" in str(error).lower():
                    raise
                return {}

        limit = self._patience.seconds
        with announced("%s, for up to %g s of failures in a row", self._where(below), limit):
            found = self._patience.run(f"cannot list {self._where(below)}", find)
        start = len(self._root) + 1
        return {name[start:]: int(entry["size"] or 0) for name, entry in found.items()}

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        return self._patience.run(
            f"cannot read {self._where(name)}", lambda: bytes(self._files.cat_file(self._at(name)))
        )

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``."""

        def read() -> bytes:
            data = bytes(self._files.cat_file(self._at(name), start=start, end=stop))
            if len(data) != stop - start:
                raise ConnectionError(f"received {len(data)} bytes, expected {stop - start}")
            return data

        return self._patience.run(f"cannot read {self._where(name)}", read)

    def put(self, name: str, path: Path) -> None:
        """Upload a file, as a multipart upload if it is large."""
        is_s3 = self.address.scheme in _S3
        options = {"chunksize": _PART, "max_concurrency": 4} if is_s3 else {}

        def put() -> None:
            self._make_room(name)
            self._files.put_file(str(path), self._at(name), **options)

        self._patience.run(f"cannot write {self._where(name)}", put)

    def write(self, name: str, data: bytes) -> None:
        """Give ``name`` the content ``data``."""

        def write() -> None:
            self._make_room(name)
            self._files.pipe_file(self._at(name), data)

        self._patience.run(f"cannot write {self._where(name)}", write)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file, atomically if the store can; False if there is one with other content."""

        def create() -> None:
            self._make_room(name)
            try:
                self._files.pipe_file(self._at(name), data, mode="create")
            except (TypeError, NotImplementedError):
                if self._files.exists(self._at(name)):
                    raise FileExistsError(name) from None
                self._files.pipe_file(self._at(name), data)
            except Exception as error:
                if status_of(error) != PRECONDITION_FAILED:
                    raise
                raise FileExistsError(name) from error

        try:
            self._patience.run(f"cannot write {self._where(name)}", create)
        except FileExistsError:  # be it by a try of ours whose answer was lost
            return self.read(name) == data
        return True

    def delete(self, name: str) -> None:
        """Delete a file. It is no error if it no longer exists."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._at(name))

        self._patience.run(f"cannot delete {self._where(name)}", delete)

    def delete_folder(self, name: str) -> None:
        """Delete the remaining folder of deleted files, in stores that have folders."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._at(name), recursive=True)

        if not self._is_flat:
            self._patience.run(f"cannot delete {self._where(name)}", delete)

    @property
    def _is_flat(self) -> bool:
        return self.address.scheme in _FLAT

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _where(self, name: str) -> str:
        return f"{self.address}/{name}".rstrip("/")

    def _make_room(self, name: str) -> None:
        """Create the folder of a file, in stores that have folders."""
        if not self._is_flat:
            self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)


def _open(address: Address) -> tuple[Any, str]:
    """The file system, without a cache of listings, and the folder's path in it."""
    cls = _class_of(address)
    options = {**cls._get_kwargs_from_urls(str(address)), "use_listings_cache": False}
    if address.scheme in _S3:
        options["config_kwargs"] = {"retries": _FEW}
    try:
        files = cls(**options)
        if address.scheme in _S3:
            files.retries = 2
    except Exception as error:
        raise StoreError(f"{address}: cannot open the store: {error}") from error
    return files, str(files._strip_protocol(str(address))).rstrip("/")


def _class_of(address: Address) -> Any:
    from fsspec import get_filesystem_class
    from fsspec.registry import available_protocols

    known = ["s3", "gs", *sorted(available_protocols())]
    if address.scheme not in known:
        close = difflib.get_close_matches(address.scheme, known, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise StoreError(f"{address}: unknown scheme {address.scheme!r}{hint}")
    try:
        return get_filesystem_class(address.scheme)
    except ImportError as error:
        package = PACKAGES.get(address.scheme)
        install = installation(package) if package else str(error)
        raise StoreError(f"{address}: a package is missing; {install}") from None
