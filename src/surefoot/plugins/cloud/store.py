"""A folder in an object store: all calls of fsspec are here, retried while a store is away.

``Store`` has the calls. ``RetryPolicy`` repeats one until a time has passed, if ``is_passing`` says
that its error may pass, and makes a ``StoreError`` for people of the last one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError, did_you_mean, installation
from ...log import announced, fell_back
from ...storage.remote import Address

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # of each scheme
_S3 = ("s3", "s3a")
_FLAT = {*_S3, "gs", "gcs", "abfs", "abfss", "az", "adl", "memory", "oss", "r2", "tos"}
# botocore, s3fs and RetryPolicy would multiply the tries of each other.
_FEW_RETRIES = {"mode": "standard", "max_attempts": 2}
_PART = 16 << 20  # bytes of one part of a large file on its way


class StoreError(CheckpointError):
    """A store cannot be reached, or refuses; its data is not known to be damaged."""


class MissingError(StoreError):
    """The object does not exist."""


@cache
def _say_not_atomic(kind: str) -> None:
    what = "a file that must not exist is created after a look whether it does"
    fell_back(what, f"{kind} cannot do both at once", "notices no other run that does so, too")


class Store:
    """The folder ``address``; names in it are relative. Methods raise ``StoreError``."""

    def __init__(self, address: Address, *, seconds: float = 600) -> None:
        self.address = address
        self._retries = RetryPolicy(seconds)
        self._files, self._root = _open(address)
        self._is_s3 = address.scheme in _S3
        self._is_flat = address.scheme in _FLAT  # has no folders to create or to delete

    def list(self, below: str = "") -> dict[str, int]:
        """Every file in the folder (or in ``below``) with its length in bytes."""

        def find(path: str) -> dict[str, Any]:
            self._files.invalidate_cache()
            try:
                return dict(self._files.find(path.rstrip("/"), detail=True))
            except FileNotFoundError as error:
                # An empty folder does not exist in a store; a missing bucket is a mistake.
                if "bucket" in str(error).lower():
                    raise
                return {}

        message = "%s, for up to %g s of failures in a row"
        with announced(message, self._where(below), self._retries.seconds):
            entries = self._call("list", below, find)
        start = len(self._root) + 1
        return {path[start:]: int(entry["size"] or 0) for path, entry in entries.items()}

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        # s3fs asks for the length first, unless there is one reader.
        options = {"max_concurrency": 1} if self._is_s3 else {}
        return self._call("read", name, lambda path: bytes(self._files.cat_file(path, **options)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``."""

        def read(path: str) -> bytes:
            data = bytes(self._files.cat_file(path, start=start, end=stop))
            if len(data) != stop - start:
                # An error that may pass, so that the range is read again.
                raise ConnectionError(f"received {len(data)} bytes, expected {stop - start}")
            return data

        return self._call("read", name, read)

    def put(self, name: str, file: Path) -> None:
        """Upload a file, as a multipart upload if it is large."""
        options = {"chunksize": _PART, "max_concurrency": 4} if self._is_s3 else {}
        self._write(name, lambda path: self._files.put_file(str(file), path, **options))

    def write(self, name: str, data: bytes) -> None:
        """Give ``name`` the content ``data``."""
        self._write(name, lambda path: self._files.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Write a file, atomically if the store can; False if there is one with other content."""

        # In one request: not every server knows the condition of several parts.
        options = {"chunksize": max(1, len(data))} if self._is_s3 else {}

        def create(path: str) -> None:
            try:
                # `If-None-Match: *` on S3, and its like elsewhere (decisions/0015).
                self._files.pipe_file(path, data, mode="create", **options)
            except (TypeError, NotImplementedError):
                _say_not_atomic(type(self._files).__name__)
                if self._files.exists(path):
                    raise FileExistsError(name) from None
                self._files.pipe_file(path, data)
            except Exception as error:
                if _status_of(error) != 412:  # HTTP's "Precondition Failed"
                    raise
                raise FileExistsError(name) from error

        try:
            self._write(name, create)
        except FileExistsError:  # be it by a try of ours whose answer was lost
            return self.read(name) == data
        return True

    def copy(self, name: str, target: str) -> None:
        """Give ``target`` the content of the file ``name``; its bytes stay in the store."""
        self._write(target, lambda path: self._files.cp_file(f"{self._root}/{name}", path))

    def delete(self, name: str) -> None:
        """Delete a file. It is no error if it no longer exists."""

        def delete(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)

        self._call("delete", name, delete)

    def delete_folder(self, name: str) -> None:
        """Delete the remaining folder of deleted files, in stores that have folders."""

        def delete(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(path, recursive=True)

        if not self._is_flat:
            self._call("delete", name, delete)

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        def write_in_folder(path: str) -> None:
            if not self._is_flat:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

        self._call("write", name, write_in_folder)

    def _call(self, verb: str, name: str, call: Callable[[str], T]) -> T:
        """``call`` with the path of ``name``, retried; ``verb`` is for the error."""
        path = f"{self._root}/{name}"
        return self._retries.run(f"cannot {verb} {self._where(name)}", lambda: call(path))

    def _where(self, name: str) -> str:
        return f"{self.address}/{name}".rstrip("/")


def _open(address: Address) -> tuple[Any, str]:
    """The file system, without a cache of listings, and the folder's path in it."""
    from fsspec import get_filesystem_class
    from fsspec.registry import available_protocols

    schemes = ["s3", "gs", *sorted(available_protocols())]
    if address.scheme not in schemes:
        hint = did_you_mean(address.scheme, schemes, cutoff=0.5)
        raise StoreError(f"{address}: unknown scheme {address.scheme!r}{hint}")
    try:
        cls = get_filesystem_class(address.scheme)
    except ImportError as error:
        package = _PACKAGES.get(address.scheme)
        install = installation(package) if package else str(error)
        raise StoreError(f"{address}: a package is missing; {install}") from None
    options = {**cls._get_kwargs_from_urls(str(address)), "use_listings_cache": False}
    try:
        if address.scheme in _S3:
            options["config_kwargs"] = _s3_settings()
        files = cls(**options)
        if address.scheme in _S3:
            files.retries = 2
    except Exception as error:
        raise StoreError(f"{address}: cannot open the store: {error}") from error
    return files, str(files._strip_protocol(str(address))).rstrip("/")


def _s3_settings() -> dict[str, Any]:
    """Settings of botocore. Of another server than Amazon's, no checksums that come behind the
    data: many do not know them (Hugging Face's answers 501), and each byte of a checkpoint has a
    hash of Surefoot's."""
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.session import Session

    session, settings = Session(), dict[str, Any](retries=_FEW_RETRIES)
    scoped = session.get_scoped_config()
    if ConfiguredEndpointProvider(session.full_config, scoped, client_name="s3").provide():
        for name in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{name.upper()}" not in os.environ and name not in scoped:
                settings[name] = "when_required"
    return settings


_FIRST, _LONGEST = 0.2, 30.0  # seconds between two tries


@dataclass
class RetryPolicy:
    """How long to retry, with growing random pauses, so that many clients do not retry together."""

    # A time, not a number of tries as in botocore and s3fs: a store may be away for minutes
    # (decisions/0078).
    seconds: float  # of trying, before an operation has failed
    _random: random.Random = field(default_factory=random.SystemRandom, repr=False)

    def run(self, what: str, call: Callable[[], T]) -> T:
        """``call()``, repeated while its errors are temporary; others become ``StoreError``. But a
        ``FileExistsError`` is an answer, for the caller."""
        began, pause, tries = time.monotonic(), _FIRST, 0
        while True:
            try:
                return call()
            except FileExistsError:
                raise
            except Exception as error:
                tries += 1
                remaining = self.seconds - (time.monotonic() - began)
                if not is_passing(error) or remaining <= 0:
                    raise _explained(what, error, tries) from error
                # Once, after about a second: what passes sooner is not worth a line.
                log = logger.warning if tries == 4 else logger.debug
                log("%s: %s; retrying for up to %.0f s", what, _message_of(error), remaining)
            time.sleep(min(pause * self._random.uniform(0.5, 1.0), remaining))
            pause = min(2 * pause, _LONGEST)


_CREDENTIALS = re.compile("Credential|Token|Profile|SSO|RefreshError|Authentication")
# What an error of our own call is; what a library or the network raises may pass.
_FINAL = (
    *(TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError),
    *(PermissionError, FileNotFoundError, FileExistsError),
    *(IsADirectoryError, NotADirectoryError),
)
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR}
_LASTING = {*_DISK, errno.ENOSYS}  # s3fs has the second for a status of 501


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    status = _status_of(error)
    if status is not None:
        # Timeout, conflict, too early, too many requests. What a server does not have stays so.
        return (status >= 500 and status != 501) or status in (408, 409, 425, 429)
    is_final = isinstance(error, _FINAL) or getattr(error, "errno", None) in _LASTING
    return not is_final and not _lacks_credentials(error)


def _lacks_credentials(error: BaseException) -> bool:
    # By name: each library has classes of its own, and none of them need be installed.
    return any(_CREDENTIALS.search(cls.__name__) for cls in type(error).__mro__)


def _status_of(error: BaseException) -> int | None:
    """The HTTP status of a library's error, if it has one."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        statuses = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        statuses = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    return next((status for status in statuses if isinstance(status, int)), None)


# What an S3 server calls a mistake of a setting, and how it is mended.
_SETTINGS = {
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
        "the bucket is in another region {}; set AWS_DEFAULT_REGION (or `region` of the profile) "
        "to that of the bucket",
    ),
    "RequestTimeTooSkewed": "the clock of this machine is wrong {}; set it, for example with "
    "`timedatectl set-ntp true`",
}


def _explained(what: str, error: Exception, tries: int) -> StoreError:
    """The error of a call for people, with what to do."""
    message = _message_of(error)
    if mistake := _mistake(error):
        return StoreError(f"{what}: {mistake.format(f'({message})')}")
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{what}: it does not exist")
    if is_passing(error):
        return StoreError(
            f"{what}: failed after {tries} tries, the last error: {message}; check the "
            "network and the store, then start the same command again"
        )
    return StoreError(f"{what}: {message}")


def _mistake(error: Exception) -> str | None:
    """What a user has to mend, if it is that, with a place for the library's message."""
    if _lacks_credentials(error):
        return (
            "no credentials {}; set them as for the store's own tools, "
            "for S3 with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
        )
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    if code == "NoSuchBucket" or "bucket does not exist" in str(error):
        return "this bucket does not exist; create it, or correct the URL"
    if code in _SETTINGS:
        return _SETTINGS[code]
    if isinstance(error, PermissionError) or _status_of(error) in (401, 403):
        return "no permission {}; check the credentials and their permissions"
    return None


def _message_of(error: BaseException) -> str:
    """The library's message, on one line, with the name of its error if it is short."""
    text = " ".join(str(error).split())[:300]
    return text if len(text) > 25 else f"{type(error).__name__}: {text}".rstrip(": ")
