"""Retry policy: retry temporary errors with backoff, and raise others at once.

Stores raise errors of their own libraries. These are classified by the names of their classes and
by their codes, so that no such library is imported here.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import CheckpointError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PASSING = {  # classes of the standard library, aiohttp, botocore, fsspec, gcsfs, azure, requests
    "ConnectionError",
    "TimeoutError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerTimeoutError",
    "ServerDisconnectedError",
    "HTTPClientError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "ReadTimeoutError",
    "ConnectTimeoutError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseParserError",
    "ResponseStreamingError",
    "FSTimeoutError",
    "ServiceRequestError",
    "ServiceResponseError",
    "SSLError",
}
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
}
_BUSY = {errno.EBUSY, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, getattr(errno, "EREMOTEIO", -1)}
_FIRST, _LONGEST = 0.2, 30.0  # seconds between two tries


class StoreError(CheckpointError):
    """A store cannot be reached, or refuses; its data is not known to be damaged."""


class MissingError(StoreError):
    """The object does not exist."""


@dataclass
class RetryPolicy:
    """How long to retry, with growing random pauses, so that many clients do not retry together."""

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
                log = logger.warning if tries == 4 else logger.debug
                log("%s: %s; retrying for up to %.0f s", what, said(error), left)
            time.sleep(min(pause * self._random.uniform(0.5, 1.0), max(left, 0)))
            pause = min(2 * pause, _LONGEST)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, PermissionError | FileNotFoundError | FileExistsError):
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _NO_CREDENTIALS:
        return False
    code = status_of(error)
    if code is not None:
        return code >= 500 or code in (408, 409, 425, 429)
    if isinstance(error, OSError) and error.errno in _BUSY:
        return True
    return bool(names & _PASSING)


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a library's error, if it has one."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for name in ("code", "status", "status_code"):
        found = getattr(error, name, None)
        if isinstance(found, int):
            return found
    return None


def said(error: BaseException) -> str:
    """The library's message, on one line, with the name of its error if it is short."""
    text = " ".join(str(error).split())[:300]
    return text if len(text) > 25 else f"{type(error).__name__}: {text}".rstrip(": ")


def _final(what: str, error: Exception, tries: int) -> StoreError:
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _NO_CREDENTIALS:
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
