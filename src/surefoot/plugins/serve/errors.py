"""Refused requests, in the form in which OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ...errors import SurefootError

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}


class ApiError(Exception):
    """A request that is not answered."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's form."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        found = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": found}

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, headers=self.headers)


class ServerBusyError(ApiError):
    """More requests wait than may."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(
            f"{waiting:,} requests are waiting already; try again in {seconds} s",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )


class ModelGoneError(ApiError):
    """A model was unloaded before a request to it could begin."""

    def __init__(self) -> None:
        super().__init__(
            "the model was unloaded before this request could begin",
            status=404,
            param="model",
            code="model_not_found",
        )


ANSWERED = (ApiError, SurefootError, HTTPException)  # all others are faults of ours


def answered(_: Request, error: Exception) -> JSONResponse:
    """The answer to a request that is refused, whose data or model has an error, or whose address
    does not exist."""
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
        return ApiError(str(error.detail), status=status, headers=headers).response
    return error.response if isinstance(error, ApiError) else ApiError(str(error)).response
