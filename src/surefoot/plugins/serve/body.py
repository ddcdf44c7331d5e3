"""The body of a request: how it is read, what every one may have, and how one is refused.

It is parsed and checked in a thread, since both grow with it and the event loop has other clients.
Lists end at their first wrong element: the errors of a million would take minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from ...errors import SurefootError

WITHOUT_EFFECT = "It has no effect on the answer."
_FIRST = Field(fail_fast=True)  # the first wrong element of a list or dict is its only error
Texts = Annotated[list[str], _FIRST]
Ids = Annotated[list[int], _FIRST]
Prompts = str | Texts | Ids | Annotated[list[Ids], _FIRST]
_MOST_PARTS = 100_000  # lists, objects and keys; a million are parsed in a second, in one call
_SHOWN = 100  # characters of a client's own key in an error
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
B = TypeVar("B", bound=BaseModel)


class Strict(BaseModel):
    """A part of a request, which has no other fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Body(Strict):
    """What every request may have."""

    model: str | None = Field(default=None, max_length=4096)
    user: str | None = Field(default=None, description=WITHOUT_EFFECT)
    metadata: dict[str, JsonValue] | None = Field(default=None, description=WITHOUT_EFFECT)
    store: bool | None = Field(default=None, description=WITHOUT_EFFECT)
    service_tier: str | None = Field(default=None, description=WITHOUT_EFFECT)
    safety_identifier: str | None = Field(default=None, description=WITHOUT_EFFECT)
    prompt_cache_key: str | None = Field(default=None, description=WITHOUT_EFFECT)


def post(
    router: APIRouter, path: str, kind: type[B], description: str | None = None
) -> Callable[[Callable[[B, HttpRequest], Any]], None]:
    """Let a function answer requests to ``path``, whose bodies are of a ``kind``. OpenAPI's schema
    has them as if FastAPI read them, which would do so on the event loop."""

    async def read(http: HttpRequest) -> B:
        content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError("the body is not JSON: send it with Content-Type: application/json")
        try:
            data = await http.body()
        except ClientDisconnect:
            raise ApiError("the body ended early, or is too long") from None
        return await asyncio.to_thread(_parsed, kind, data)

    body = Depends(read)
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=place + "/$defs/{model}")
    described = {"required": True, "content": {"application/json": {"schema": schema}}}

    def add(answer: Callable[[B, HttpRequest], Any]) -> None:
        async def answering(http: HttpRequest, body: Any = body) -> Any:
            return await answer(body, http)

        text = description or answer.__doc__
        router.post(path, openapi_extra={"requestBody": described}, description=text)(answering)

    return add


def _parsed(kind: type[B], data: bytes) -> B:
    """The body in ``data``. Raises ``ApiError``."""
    if sum(map(data.count, (b"[", b"{", b'":'))) > _MOST_PARTS:
        raise ApiError(f"the body has more than {_MOST_PARTS:,} lists, objects and keys")
    try:
        content = from_json(data)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_value") from None
    if not isinstance(content, dict):
        raise ApiError("the body is JSON, but no object: expected {...}")
    names = [field.alias or name for name, field in kind.model_fields.items()]
    if unknown := next((name for name in content if name not in names), None):
        raise _unknown(str(unknown)[:_SHOWN])
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), content) from None


def _refusal(errors: Sequence[ErrorDetails], content: object) -> ApiError:
    """The first wrong parameter, under the names that the client has sent. A value that fits none
    of several forms has an error for each of them; the longest paths are of the form that was
    meant."""
    parameter_errors = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    deepest = max(len(error["loc"]) for error in parameter_errors)
    deepest_errors = [error for error in parameter_errors if len(error["loc"]) == deepest]
    places = zip(*(_sent(error, content) for error in deepest_errors), strict=False)
    name = ".".join(parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, places))
    if deepest_errors[0]["type"] == "extra_forbidden":
        return _unknown(name)
    reasons = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in deepest_errors)
    return ApiError(f"{name}: {', or '.join(reasons)}", param=name, code="invalid_value")


def _sent(error: ErrorDetails, value: Any) -> list[str]:
    """Where an error is, without the names that pydantic gives to the forms of a value."""
    names = []
    for part in error["loc"]:
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            names.append(str(part)[:_SHOWN])
    return [*names, str(error["loc"][-1])] if error["type"] == "missing" else names


def _unknown(name: str) -> ApiError:
    message = f"{name}: this server has no such parameter, and ignores none; remove it"
    return ApiError(message, param=name, code="unknown_parameter")


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
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, headers=self.headers)


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


def answered(_: HttpRequest, error: Exception) -> JSONResponse:
    """The answer to a request that is refused, whose data or model has an error, or whose address
    does not exist."""
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
        return ApiError(str(error.detail), status=status, headers=headers).response
    return error.response if isinstance(error, ApiError) else ApiError(str(error)).response
