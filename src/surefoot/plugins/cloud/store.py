"""A folder in an object store: all calls of fsspec are here, retried if that is useful."""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...checkpoint.disk.commit import step_of
from ...checkpoint.disk.manifest import MANIFEST
from ...errors import CheckpointError, installation
from ...log import announced
from ...storage.remote import Address


@dataclass(frozen=True)
class Contents:
    """Names and lengths of all files of a run."""

    files: Mapping[str, int]

    @property
    def committed(self) -> dict[int, str]:
        """The names of the checkpoints that have a manifest, by step, oldest first."""
        return self._checkpoints(with_manifest=True)

    @property
    def uncommitted(self) -> dict[int, str]:
        """The same for those that have none: half uploaded, or half deleted."""
        return self._checkpoints(with_manifest=False)

    def inside(self, folder: str) -> dict[str, int]:
        """The files of a checkpoint by their name in it."""
        start = f"{folder}/"
        return {
            n.removeprefix(start): size for n, size in self.files.items() if n.startswith(start)
        }

    @property
    def of_the_run(self) -> list[str]:
        """The files outside of checkpoints: recipe, metrics, plots."""
        return [name for name in self.files if not name.startswith((".", "checkpoint-"))]

    def _checkpoints(self, *, with_manifest: bool) -> dict[int, str]:
        folders = {name.partition("/")[0] for name in self.files if "/" in name}
        steps = {step_of(Path(folder)): folder for folder in folders}
        return {
            step: steps[step]
            for step in sorted(steps)
            if step >= 0 and (f"{steps[step]}/{MANIFEST}" in self.files) == with_manifest
        }


def readable(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_RUN_FILE = 1 << 30  # bytes of a file of a run that is no checkpoint's

_CREDENTIALS = re.compile("Credential|Token|Profile|SSO|RefreshError|Authentication")
# What an error of our own call is; what a library or the network raises may pass.
_FINAL = (
    *(TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError),
    *(PermissionError, FileNotFoundError, FileExistsError),
    *(IsADirectoryError, NotADirectoryError),
)
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR}
_FIRST, _LONGEST = 0.2, 30.0  # seconds between two tries


class StoreError(CheckpointError):
    """A store cannot be reached, or refuses; its data is not known to be damaged."""


class MissingError(StoreError):
    """The object does not exist."""


@dataclass
class RetryPolicy:
    """How long to retry, with growing random pauses, so that many clients do not retry together."""

    # A time, not a number of tries as in botocore and s3fs: a store may be away for minutes
    # (decisions/0078).
    seconds: float  # of trying, before an operation has failed
    _random: random.Random = field(default_factory=random.SystemRandom, repr=False)

    def run(self, what: str, call: Callable[[], T]) -> T:
        """``call()``, repeated while its errors are temporary; others become ``StoreError``."""
        began, pause, tries = time.monotonic(), _FIRST, 0
        while True:
            try:
                return call()
            except FileExistsError:
                raise
            except Exception as error:
                tries += 1
                left = self.seconds - (time.monotonic() - began)
                if not is_passing(error) or left <= 0:
                    raise _final(what, error, tries) from error
                # Once, after about a second: what passes sooner is not worth a line.
                log = logger.warning if tries == 4 else logger.debug
                log("%s: %s; retrying for up to %.0f s", what, said(error), left)
            time.sleep(min(pause * self._random.uniform(0.5, 1.0), max(left, 0)))
            pause = min(2 * pause, _LONGEST)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    code = status_of(error)
    if code is not None:
        # Timeout, conflict, too early, too many requests.
        return code >= 500 or code in (408, 409, 425, 429)
    is_final = isinstance(error, _FINAL) or getattr(error, "errno", None) in _DISK
    return not is_final and not _lacks_credentials(error)


def _lacks_credentials(error: BaseException) -> bool:
    # By name: each library has classes of its own, and none of them need be installed.
    return any(_CREDENTIALS.search(cls.__name__) for cls in type(error).__mro__)


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a library's error, if it has one."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("code", "status", "status_code"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status
    return None


def said(error: BaseException) -> str:
    """The library's message, on one line, with the name of its error if it is short."""
    text = " ".join(str(error).split())[:300]
    return text if len(text) > 25 else f"{type(error).__name__}: {text}".rstrip(": ")


def _final(what: str, error: Exception, tries: int) -> StoreError:
    if _lacks_credentials(error):
        return StoreError(
            f"{what}: no credentials ({said(error)}); set them as for the store's own tools, "
            "for S3 with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
        )
    if "NoSuchBucket" in repr(error.__cause__) or "bucket does not exist" in str(error):
        return StoreError(f"{what}: this bucket does not exist; create it, or correct the URL")
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{what}: it does not exist")
    if isinstance(error, PermissionError) or status_of(error) in (401, 403):
        return StoreError(
            f"{what}: no permission ({said(error)}); check the credentials and their permissions"
        )
    if is_passing(error):
        return StoreError(
            f"{what}: failed after {tries} tries, the last error: {said(error)}; check the "
            "network and the store, then start the same command again"
        )
    return StoreError(f"{what}: {said(error)}")


PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # of each scheme
_S3 = ("s3", "s3a")
_FLAT = {*_S3, "gs", "gcs", "abfs", "abfss", "az", "adl", "memory", "oss", "r2", "tos"}
PRECONDITION_FAILED = 412  # HTTP: the file that must not exist does
# botocore, s3fs and the loop of RetryPolicy would multiply the tries of each other.
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
                # An empty folder does not exist in a store; a missing bucket is a mistake.
                if "bucket" in str(error).lower():
                    raise
                return {}

        limit = self._patience.seconds
        with announced("%s, for up to %g s of failures in a row", self._where(below), limit):
            entries = self._patience.run(f"cannot list {self._where(below)}", find)
        start = len(self._root) + 1
        return {name[start:]: int(entry["size"] or 0) for name, entry in entries.items()}

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
                # An error that may pass, so that the range is read again.
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
                # `If-None-Match: *` on S3, and its like elsewhere (decisions/0015).
                self._files.pipe_file(self._at(name), data, mode="create")
            except (TypeError, NotImplementedError):
                # A store with neither: a look before is the most that it allows.
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

    schemes = ["s3", "gs", *sorted(available_protocols())]
    if address.scheme not in schemes:
        close = difflib.get_close_matches(address.scheme, schemes, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise StoreError(f"{address}: unknown scheme {address.scheme!r}{hint}")
    try:
        return get_filesystem_class(address.scheme)
    except ImportError as error:
        package = PACKAGES.get(address.scheme)
        install = installation(package) if package else str(error)
        raise StoreError(f"{address}: a package is missing; {install}") from None
