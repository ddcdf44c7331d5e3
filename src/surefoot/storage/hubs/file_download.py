"""Download one file over HTTP: resumed after an interruption, verified before it gets its name."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import logging
import os
import re
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
LEAST = 1 << 16  # bytes in that time, else it counts as lost, too
TRIES, WAIT = 5, 0.5  # in a row without progress; seconds before the second one, then doubled
LOCK = ".surefoot.lock"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_LOST = (OSError, http.client.HTTPException)
_TAGS = ("ETag", "Last-Modified")
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
    tag: str | None = None  # of its version; without it and a hash, no download is resumed


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
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.HTTPError(newurl, code, "a redirect to no web address", headers, fp)
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        is_open = found is not None and (req.type, found.type) == ("https", "http")
        if found is not None and (found.host != req.host or is_open):
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
    failures, furthest, tag = 0, 0, file.tag
    while True:
        before = part.stat().st_size if part.exists() else 0
        if file.size is not None and before >= file.size > 0:
            return
        try:
            with _opened(file, part, before, tag) as answer:
                is_more = answer.status == _PARTIAL
                tag = tag if is_more else tag_of(answer.headers)
                _append(answer, part, file.size, is_more=is_more)
            return
        except urllib.error.HTTPError as error:
            if error.code < 500 or failures + 1 >= TRIES:
                _refused(file.url, error)
            lost: Exception = error
        except NotReachedError as error:
            if failures + 1 >= TRIES or _has_no_address(file.url):
                raise
            lost = error
        except _LOST as error:
            lost = error
        size = part.stat().st_size if part.exists() else 0
        failures = 0 if size >= furthest + LEAST else failures + 1
        furthest = max(furthest, size)
        if failures >= TRIES:
            raise _not_reached(file.url, lost) from lost
        logger.info("%s: connection lost (%s); resuming", file.url, lost)
        time.sleep(WAIT * 2**failures)


def _opened(file: RemoteFile, part: Path, before: int, tag: str | None) -> http.client.HTTPResponse:
    """The answer with the bytes from ``before`` on, of the version ``tag``, or with all of them. If
    what there is cannot be continued, it is deleted; raises ``ConnectionError``."""
    if not before or not (tag or file.sha256):  # nothing would prove that both are of one version
        return request(file.url, file.headers)
    asked = {"Range": f"bytes={before}-"} | ({"If-Range": tag} if tag else {})
    try:
        answer = request(file.url, {**file.headers, **asked})
    except urllib.error.HTTPError as error:
        if error.code != _UNSATISFIABLE:
            raise
        error.close()
        part.unlink()
        raise ConnectionError(f"{error.code}: it has no bytes from {before:,} on") from error
    is_more = answer.status == _PARTIAL
    words = "resuming %s at byte %d" if is_more else "%s cannot be resumed at byte %d"
    logger.info(words, file.url, before)
    if is_more:
        said = answer.headers.get("Content-Range", "")
        tags = {answer.headers.get(name) for name in _TAGS} - {None}
        total = r"\d+|\*" if file.size is None else rf"{file.size}|\*"
        is_there = re.fullmatch(rf"bytes {before}-\d+/({total})", said.strip())
        if not is_there or (tag and tags and tag not in tags):
            answer.close()
            part.unlink()
            raise ConnectionError(f"asked for the bytes from {before} on, got {said[:80]!r}")
    return answer


def _append(
    answer: http.client.HTTPResponse, part: Path, size: int | None, *, is_more: bool
) -> None:
    """Write what comes. A body that is longer than its file, or too slow, is not read further."""
    if not is_more:
        part.unlink(missing_ok=True)
    since, arrived = time.monotonic(), 0
    with _writing(), files.open_or_create(part) as opened:
        length = opened.size
        while chunk := answer.read1(CHUNK):
            opened.write_at(length, chunk)
            length, arrived = length + len(chunk), arrived + len(chunk)
            if size is not None and length > size:
                return  # which the caller finds to be wrong
            if time.monotonic() - since > SECONDS:
                if arrived < LEAST:
                    raise ConnectionError(f"only {arrived:,} bytes in {SECONDS:.0f} s")
                since, arrived = time.monotonic(), 0
        opened.sync()
    if answer.length:  # bytes that were announced, and did not arrive
        raise ConnectionError(f"{answer.length:,} bytes are missing")


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """A disk that takes no more is no lost connection; its errors name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise HubError(f"cannot write {files.explain(error)}") from error


def tag_of(headers: http.client.HTTPMessage) -> str | None:
    """What tells one version of a file from another, as its server says it."""
    return next((headers[name] for name in _TAGS if headers.get(name)), None)


def _refused(url: str, error: urllib.error.HTTPError) -> NoReturn:
    error.close()
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
