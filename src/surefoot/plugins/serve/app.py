"""The application: all addresses, their errors, and the guard in front of them.

Who may use the server: this machine, or whoever has the key. The Host of a request must be a name
of this machine or one that was given at the start, so that no page of another site reaches the
server under a name of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import __version__
from ...storage.web import Hosts, LimitedBody
from .body import ANSWERED, ApiError, Strict, answered, post
from .completions import Chat, ChatCompletionBody, Completion, CompletionBody
from .models import ServeSettings
from .responses import ServerState, answer_at

_OPEN = ("/health",)  # for whoever watches over the server


def create_app(settings: ServeSettings) -> ASGIApp:
    """The server of what ``settings`` name. The model is opened here, so that an error of it is one
    of the command line."""
    state = ServerState(settings)
    state.models.open_first()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.engine.start(asyncio.get_running_loop())
        await state.models.load_given()
        yield
        await asyncio.to_thread(state.engine.close)

    app = FastAPI(
        title="Surefoot", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    router = APIRouter()
    answer_at(router, "/v1/chat/completions", Chat, ChatCompletionBody, state)
    answer_at(router, "/v1/completions", Completion, CompletionBody, state)
    _add_models(router, state)
    app.include_router(router)
    for error in ANSWERED:
        app.add_exception_handler(error, answered)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        """Whether it is up, and how much it does."""
        return {"status": "ok", **state.figures}

    return ApiGuard(app, settings.api_key, settings.hosts, settings.max_body)


class AdapterNameBody(Strict):
    """An adapter to unload, as vLLM takes it."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = None


class AdapterBody(AdapterNameBody):
    """An adapter to load."""

    lora_path: str = Field(min_length=1, max_length=4096)


class WeightsBody(Strict):
    """Weights to serve in place of those that came before."""

    path: str = Field(min_length=1, max_length=4096)
    name: str | None = Field(default=None, min_length=1, max_length=200)
    kind: Literal["full", "adapter"]


def _add_models(router: APIRouter, state: ServerState) -> None:
    """``/v1/models``, and adapters that are loaded and unloaded while the server runs."""
    models = state.models

    @router.get("/v1/models")
    async def every() -> dict[str, object]:
        """The models that requests may name."""
        return {"object": "list", "data": list(models.cards.values())}

    @router.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, object]:
        """One of them."""
        if name not in models.cards:
            raise models.unknown(name)
        return models.cards[name]

    @post(router, "/v1/load_lora_adapter", AdapterBody)
    async def load(body: AdapterBody, _: HttpRequest) -> Response:
        """Serve the adapter in a folder of this machine under a name."""
        await models.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @post(router, "/v1/unload_lora_adapter", AdapterNameBody)
    async def unload(body: AdapterNameBody, _: HttpRequest) -> Response:
        """Let an adapter go. Requests to it that have begun are answered."""
        await models.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @post(router, "/v1/update_weights", WeightsBody)
    async def update(body: WeightsBody, _: HttpRequest) -> dict[str, object]:
        """Serve the weights in a folder under a name, in place of those that came before them."""
        name = body.name or f"weights-{secrets.token_hex(4)}"
        await models.replace(body.path, is_adapter=body.kind == "adapter", name=name)
        return {"model": name}


@dataclass(frozen=True)
class ApiGuard:
    """Refuses requests without permission, before any other code runs."""

    app: ASGIApp
    api_key: str | None
    hosts: Hosts
    max_body: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        if (refused := self._refusal(scope)) is not None:
            await refused.response(scope, receive, send)
        else:
            await self.app(scope, LimitedBody(receive, self.max_body), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if why := self.hosts.refusal(headers.getlist("host"), "server"):
            return ApiError(why, status=421)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return ApiError("content-length: expected digits")
        if int(length) > self.max_body:
            return ApiError(f"the request has more than {self.max_body:,} bytes", status=413)
        if self.api_key is None or scope["path"] in _OPEN:
            return None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(bearer.encode(), self.api_key.encode()):
            return None
        return ApiError(
            "expected the header 'Authorization: Bearer KEY' with the key of this server",
            status=401,
            code="invalid_api_key",
        )
