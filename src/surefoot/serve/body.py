"""The body of a request: what every one may have, and how it is read.

It is parsed and checked in a thread, since both grow with it and the event loop has other clients.
Lists end at their first wrong element: the errors of a million would take minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from .errors import ApiError

WITHOUT_EFFECT = "It has no effect on the answer."
FIRST = Field(fail_fast=True)  # the first wrong element of a list or dict is its only error
Texts = Annotated[list[str], FIRST]
Ids = Annotated[list[int], FIRST]
Prompts = str | Texts | Ids | Annotated[list[Ids], FIRST]
_MOST_PARTS = 100_000  # lists, objects and keys; a million are parsed in a second, in one call
_SHOWN = 100  # characters of a client's own key in an error
# the names that pydantic gives to the members of a union
_FORMS = {
    "str": "a text",
    "list[str]": "a list of texts",
    "list[int]": "a list of integers",
    "list[list[int]]": "a list of lists of integers",
}
B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    """What every request may have."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(default=None, max_length=4096)
    user: str | None = Field(default=None, description=WITHOUT_EFFECT)
    metadata: dict[str, JsonValue] | None = Field(default=None, description=WITHOUT_EFFECT)
    store: bool | None = Field(default=None, description=WITHOUT_EFFECT)
    service_tier: str | None = Field(default=None, description=WITHOUT_EFFECT)
    safety_identifier: str | None = Field(default=None, description=WITHOUT_EFFECT)
    prompt_cache_key: str | None = Field(default=None, description=WITHOUT_EFFECT)


def read(kind: type[B]) -> Any:
    """The parameter of an address that is the body as ``kind``."""

    async def body(http: HttpRequest) -> B:
        given = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != "application/json" and not given.endswith("+json"):
            raise ApiError("the body is not JSON: send it with Content-Type: application/json")
        try:
            data = await http.body()
        except ClientDisconnect:
            raise ApiError("the body ended early, or is too long") from None
        return await asyncio.to_thread(parsed, kind, data)

    return Depends(body)


def post(
    router: APIRouter, path: str, kind: type[BaseModel], answer: Callable[..., object]
) -> None:
    """Answer requests to ``path``, whose bodies ``read`` reads. OpenAPI's schema has them as if
    FastAPI did, which would do so on the event loop."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=place + "/$defs/{model}")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    router.post(path, openapi_extra={"requestBody": body})(answer)


def parsed(kind: type[B], data: bytes) -> B:
    """The body in ``data``. Raises ``ApiError``."""
    if sum(map(data.count, (b"[", b"{", b'":'))) > _MOST_PARTS:
        raise ApiError(f"the body has more than {_MOST_PARTS:,} lists, objects and keys")
    try:
        given = from_json(data)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_value") from None
    if not isinstance(given, dict):
        raise ApiError("the body is JSON, but no object: expected {...}")
    names = [field.alias or name for name, field in kind.model_fields.items()]
    if unknown := next((name for name in given if name not in names), None):
        raise _unknown(str(unknown)[:_SHOWN])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), given) from None


def _refusal(errors: Sequence[ErrorDetails], given: object) -> ApiError:
    """The first error, under the names that the client has sent. A value that fits none of several
    forms has an error for each of them, with the form's name in its place."""
    first = errors[0]
    names, value = [], given
    for place, part in enumerate(first["loc"]):
        is_sent = isinstance(part, str) and isinstance(value, dict) and part in value
        if is_sent or (isinstance(part, int) and isinstance(value, list)):
            value = value[part]  # type: ignore[index]
        elif isinstance(value, dict) and first["type"] == "missing":
            value = None
        else:
            forms = [one for one in errors if one["loc"][:place] == first["loc"][:place]]
            message = _of_forms(forms, value, place)
            break
        names.append(str(part)[:_SHOWN])
    else:
        message = first["msg"].removeprefix("Value error, ")
    name = ".".join(names)
    if first["type"] == "extra_forbidden":
        return _unknown(name)
    return ApiError(f"{name}: {message}", param=name, code="invalid_value")


def _unknown(name: str) -> ApiError:
    message = f"{name}: this server has no such parameter, and ignores none; remove it"
    return ApiError(message, param=name, code="unknown_parameter")


def _of_forms(errors: Sequence[ErrorDetails], value: object, place: int) -> str:
    """What a value was expected to be; if it is an object, what is wrong inside."""
    inside = [one for one in errors if len(one["loc"]) > place + 1]
    if isinstance(value, dict) and inside:
        name = ".".join(str(part)[:_SHOWN] for part in inside[0]["loc"][place + 1 :])
        return f"{name}: {inside[0]['msg']}"
    if len(errors) == 1:
        return errors[0]["msg"]
    forms = dict.fromkeys(_form(str(one["loc"][place]), one) for one in errors)
    *before, last = forms
    return f"expected {', '.join(before)} or {last}" if before else f"expected {last}"


def _form(name: str, error: ErrorDetails) -> str:
    if name.startswith("literal["):
        return str(error["ctx"]["expected"])
    return _FORMS.get(name, "a list" if name.startswith("list[") else "an object")
