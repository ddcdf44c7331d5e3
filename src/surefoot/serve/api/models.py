"""``/v1/models``, and adapters that are loaded and unloaded while the server runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from ..body import post, read
from ..server_state import ServerState


class AdapterBody(BaseModel):
    """An adapter to load, as vLLM takes it."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)


class AdapterNameBody(BaseModel):
    """An adapter to unload."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = None


class WeightsBody(BaseModel):
    """Weights to serve in place of those that came before."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096)
    name: str | None = Field(default=None, min_length=1, max_length=200)
    kind: Literal["full", "adapter"]


def routes(state: ServerState) -> APIRouter:
    """The addresses of models."""
    router = APIRouter()
    router.get("/v1/models")(_list(state))
    router.get("/v1/models/{name:path}")(_card(state))
    post(router, "/v1/load_lora_adapter", AdapterBody, _load(state))
    post(router, "/v1/unload_lora_adapter", AdapterNameBody, _unload(state))
    post(router, "/v1/update_weights", WeightsBody, _update(state))
    return router


def _list(state: ServerState) -> Callable[..., object]:
    async def models() -> dict[str, object]:
        """The models that requests may name."""
        return {"object": "list", "data": state.models.cards}

    return models


def _card(state: ServerState) -> Callable[..., object]:
    async def model(name: str) -> dict[str, object]:
        """One of them."""
        found = [card for card in state.models.cards if card["id"] == name]
        return found[0] if found else state.models.refuse(name)

    return model


def _load(state: ServerState) -> Callable[..., object]:
    async def load(body: Annotated[AdapterBody, read(AdapterBody)]) -> PlainTextResponse:
        """Serve the adapter in a folder of this machine under a name."""
        await state.models.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    return load


def _unload(state: ServerState) -> Callable[..., object]:
    async def unload(body: Annotated[AdapterNameBody, read(AdapterNameBody)]) -> PlainTextResponse:
        """Let an adapter go. Requests to it that have begun are answered."""
        await state.models.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return unload


def _update(state: ServerState) -> Callable[..., object]:
    async def update(body: Annotated[WeightsBody, read(WeightsBody)]) -> dict[str, object]:
        """Serve the weights in a folder under a name, in place of those that came before them."""
        name = body.name or f"weights-{secrets.token_hex(4)}"
        is_adapter = body.kind == "adapter"
        found = await state.models.replace(body.path, is_adapter=is_adapter, name=name)
        return {"model": found.name}

    return update
