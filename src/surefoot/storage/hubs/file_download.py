"""Download one file over HTTP: resumed after an interruption, verified before it gets its name."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import logging
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn
from urllib.parse import urlsplit

from ...errors import SurefootError
from ...log import announced
from .. import files

logger = logging.getLogger(__name__)
CHUNK = 1 << 20  # bytes that are read at a time
SECONDS = 60.0  # without a byte, after which the connection counts as lost
TRIES, WAIT = 5, 0.5  # in a row without progress; seconds before the second one, then doubled
LOCK = ".surefoot.lock"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_LOST = (OSError, http.client.HTTPException)
_PARTIAL, _UNSATISFIABLE = 206, 416  # HTTP status


class HubError(SurefootError):
    """A file cannot be downloaded, or is not the one that its server announces."""


class NotReachedError(HubError):
    """No answer: there is no network, or the server is down."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server."""

    url: str
    size: int | None = None  # bytes, if known
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def offline_setting(environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable that forbids the network, if one is set."""
    for name in OFFLINE:
        if environment.get(name, "").strip().lower() in ("1", "true", "yes", "on"):
            return name
    return None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and sends secrets to the first host alone."""

    def redirect_request(  # the arguments are those of urllib
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The next request."""
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None and found.host != req.host:
            for name in ("Authorization", "Cookie"):
                found.remove_header(name)
        return found


_OTHER = (
    "another process that downloads the same, until it is done or ends; it holds %s (`fuser` shows "
    "its number)"
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder``, and wait until no other process downloads to it. Raises ``HubError``."""
    with files.raising(HubError, f"cannot write to {folder}"):
        files.make_folder(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with announced(_OTHER, folder / LOCK), contextlib.suppress(OSError):  # one without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_online(what: str) -> None:
    """Raises ``HubError`` if a variable forbids the network."""
    if (name := offline_setting()) is not None:
        raise HubError(
            f"{what} is not on this machine, and {name} is set; unset {name}, or download it on a "
            "machine with a network"
        )


def request(url: str, headers: Mapping[str, str], method: str = "GET") -> http.client.HTTPResponse:
    """Open ``url``. Raises ``HTTPError``: the server refuses; ``NotReachedError``: no answer."""
    asked = urllib.request.Request(
        url, headers={"User-Agent": "surefoot", **headers}, method=method
    )
    try:
        opener = urllib.request.build_opener(_Redirects)
        answer: http.client.HTTPResponse = opener.open(asked, timeout=SECONDS)
    except urllib.error.HTTPError:
        raise
    except _LOST as error:
        raise _not_reached(url, error) from error
    return answer


def download(file: RemoteFile, path: Path) -> Path:
    """Download ``file`` to ``path``. What an interrupted call has left in ``path.part`` is
    continued. Raises ``HubError``: the server refuses, or the bytes are not the right ones."""
    check_online(file.url)
    part = path.with_name(f"{path.name}.part")
    with files.raising(HubError, f"cannot write {part}"):
        files.make_folder(path.parent)
    for is_last in (False, True):
        _fetch(file, part)
        wrong = _wrong(file, part)
        if wrong is None:
            with files.raising(HubError, f"cannot write {path}"):
                part.replace(path)
            return path
        part.unlink()
        if not is_last:
            logger.warning("%s: %s; downloading it again", file.url, wrong)
    raise HubError(
        f"{file.url}: {wrong}; nothing was kept. The file on the server, or a proxy on the way, is "
        "damaged"
    )


def digest_of(path: Path, kind: str = "sha256", head: bytes = b"") -> str:
    """The hash of ``head`` and of a file's bytes."""
    found = hashlib.new(kind, head)
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _wrong(file: RemoteFile, part: Path) -> str | None:
    size = part.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size:,} bytes arrived, expected {file.size:,}"
    if file.sha256 and (found := digest_of(part)) != file.sha256.lower():
        return f"its sha256 is {found}, expected {file.sha256.lower()}"
    return None


def _fetch(file: RemoteFile, part: Path) -> None:
    """Append to ``part`` until it is complete; a lost connection is opened again."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        if file.size is not None and before >= file.size > 0:
            return
        try:
            _append(file, part, before)
            return
        except urllib.error.HTTPError as error:
            if error.code == _UNSATISFIABLE and before:
                part.unlink()  # longer than the file is now
                continue
            if error.code < 500 or failures + 1 >= TRIES:
                _refused(file.url, error)
            lost: Exception = error
        except NotReachedError as error:
            if failures + 1 >= TRIES or _has_no_address(file.url):
                raise
            lost = error
        except _LOST as error:
            lost = error
        has_more = part.exists() and part.stat().st_size > before
        failures = 0 if has_more else failures + 1
        if failures >= TRIES:
            raise _not_reached(file.url, lost) from lost
        logger.info("%s: connection lost (%s); resuming", file.url, lost)
        time.sleep(WAIT * 2**failures)


def _append(file: RemoteFile, part: Path, before: int) -> None:
    headers = {**file.headers, **({"Range": f"bytes={before}-"} if before else {})}
    with request(file.url, headers) as answer:
        is_more = answer.status == _PARTIAL
        if before:
            words = "resuming %s at byte %d" if is_more else "%s cannot be resumed at byte %d"
            logger.info(words, file.url, before)
        with part.open("ab" if is_more else "wb") as opened:
            while chunk := answer.read1(CHUNK):
                opened.write(chunk)
            opened.flush()
            os.fsync(opened.fileno())
        if answer.length:  # bytes that were announced, and did not arrive
            raise ConnectionError(f"{answer.length:,} bytes are missing")


def _refused(url: str, error: urllib.error.HTTPError) -> NoReturn:
    raise HubError(f"{url}: the server answers {error.code} {error.reason}") from error


def _not_reached(url: str, error: Exception) -> NotReachedError:
    reason = getattr(error, "reason", error)
    host = urlsplit(url).netloc
    return NotReachedError(
        f"{host} cannot be reached ({getattr(reason, 'strerror', None) or reason}); check the "
        "network, or use a folder on this machine"
    )


def _has_no_address(url: str) -> bool:
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError:
        return True
    return False
