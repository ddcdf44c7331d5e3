"""Try again what may work the next time; say at once what will not.

Stores answer with errors of their own libraries. They are told apart by the names of their classes
and by their codes, so that no such library is imported here.
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
    """A store cannot be reached, or refuses; what lies in it is not known to be damaged."""


class MissingError(StoreError):
    """There is nothing of that name."""


@dataclass
class RetryPolicy:
    """How long to try, with pauses that grow and differ, so that many do not come back at once."""

    seconds: float  # of trying, before an operation has failed
    _random: random.Random = field(default_factory=random.SystemRandom, repr=False)

    def run(self, what: str, call: Callable[[], T]) -> T:
        """``call()``, again and again while its errors are of the passing kind.

        Raises:
            MissingError: there is nothing of that name.
            FileExistsError: the name is taken, and must not be overwritten.
            StoreError: the store refuses, or has not answered for too long.
        """
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
                log("%s: %s; trying again, for up to %.0f s", what, said(error), left)
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
    """The HTTP status that a library's error carries, if it does."""
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
    """What the library says, on one line, with the name of its error if it says little."""
    text = " ".join(str(error).split())[:300]
    return text if len(text) > 25 else f"{type(error).__name__}: {text}".rstrip(": ")


def _final(what: str, error: Exception, tries: int) -> StoreError:
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _NO_CREDENTIALS:
        return StoreError(
            f"{what}: no credentials ({said(error)}); set them as the store's own tools expect "
            "them, for S3 with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
        )
    if "NoSuchBucket" in repr(error.__cause__) or "bucket does not exist" in str(error):
        return StoreError(f"{what}: there is no such bucket; create it, or correct the URL")
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{what}: it does not exist")
    if isinstance(error, PermissionError) or status_of(error) in (401, 403):
        return StoreError(
            f"{what}: no permission ({said(error)}); check the credentials and what they allow"
        )
    if is_passing(error):
        return StoreError(
            f"{what}: no success in {tries} tries, the last answer: {said(error)}; "
            "check the network and the store, then start the same command again"
        )
    return StoreError(f"{what}: {said(error)}")
