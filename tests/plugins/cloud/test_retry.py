"""What is tried again, what is not, and for how long."""

import errno

import pytest

from surefoot.plugins.cloud.store import MissingError, RetryPolicy, StoreError, is_passing


class AnswerError(OSError):
    """An error of a library that carries the status of the answer."""

    def __init__(self, status, text="no"):
        super().__init__(text)
        cause = Exception(text)
        cause.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": text}}
        self.__cause__ = cause


class EndpointConnectionError(Exception):
    """Named as botocore's is."""


class NoCredentialsError(Exception):
    """The same."""


class HttpError(Exception):
    """Named as gcsfs's is; it has a code."""

    def __init__(self, code):
        super().__init__(f"status {code}")
        self.code = code


def failing(*errors):
    """A call that raises these, one a time, and then gives 5."""
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return 5

    return call


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("gone"),
        TimeoutError(),
        EndpointConnectionError("x"),
        AnswerError(500),
        AnswerError(503, "SlowDown"),
        AnswerError(429),
        AnswerError(409),
        HttpError(502),
        OSError(errno.EBUSY, "slow down"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_what_passes_is_tried_again(error):
    assert is_passing(error)
    assert RetryPolicy(30).run("cannot x", failing(error)) == 5


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (PermissionError("denied"), StoreError, "cannot x: no permission .*denied"),
        (AnswerError(403, "Forbidden"), StoreError, "no permission"),
        (AnswerError(403, "RequestTimeTooSkewed"), StoreError, "the clock of this machine"),
        (AnswerError(301, "PermanentRedirect"), StoreError, "another region .*DEFAULT_REGION"),
        (AnswerError(400, "AuthorizationHeaderMalformed"), StoreError, "another region"),
        (HttpError(401), StoreError, "no permission"),
        (AnswerError(501, "NotImplemented"), StoreError, "cannot x: .*NotImplemented"),
        (OSError(errno.ENOSYS, "checksum header"), StoreError, "cannot x: .*checksum header"),
        (FileNotFoundError("k"), MissingError, "cannot x: it does not exist"),
        (NoCredentialsError("none"), StoreError, "no credentials .*AWS_ACCESS_KEY_ID"),
        (ValueError("what?"), StoreError, r"cannot x: ValueError: what\?"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_will_not_pass_is_said_at_once(error, kind, why):
    assert not is_passing(error)
    with pytest.raises(kind, match=why) as caught:
        RetryPolicy(1e9).run("cannot x", failing(error))
    assert caught.value.__cause__ is error


def test_a_bucket_that_is_not_there_is_said():
    error = FileNotFoundError("The specified bucket does not exist")
    with pytest.raises(StoreError, match="this bucket does not exist"):
        RetryPolicy(0).run("cannot x", failing(error))


def test_it_gives_up_in_time_and_says_the_last_answer():
    with pytest.raises(StoreError, match=r"failed after \d+ tries, the last error: .*reset"):
        RetryPolicy(0.3).run("cannot x", failing(*[ConnectionResetError("reset")] * 99))


def test_a_name_that_is_taken_is_the_callers_business():
    with pytest.raises(FileExistsError):
        RetryPolicy(9).run("cannot x", failing(FileExistsError()))


def test_a_long_wait_is_said(caplog):
    RetryPolicy(30).run("cannot x", failing(*[TimeoutError("slow")] * 4))
    assert "cannot x: TimeoutError: slow; retrying for up to " in caplog.text
