"""Conversations: events of an answer, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from ...errors import RunError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.yaml import parse
from ..board import Board
from ..reports.recipes import refusal
from ..run_folders import inside, run_inside
from . import Answer


class MessageBody(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "tool"]
    content: str = Field(max_length=200_000)


class ChatBody(BaseModel):
    """A conversation with a run: its best or latest checkpoint, one of them, or its base model."""

    model_config = ConfigDict(extra="forbid")

    run: str = Field(max_length=4096)
    checkpoint: str = Field(default="", max_length=200)  # base: the model before training
    messages: list[MessageBody] = Field(min_length=1, max_length=400)
    system: str | None = Field(default=None, max_length=100_000)
    tools: str | None = Field(default=None, max_length=200_000)  # JSON: schemas of functions
    seed: int | None = None
    max_new_tokens: int | None = Field(default=None, ge=1, le=32_768)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)


def routes(board: Board) -> APIRouter:
    """The addresses of conversations."""
    router = APIRouter(prefix="/api")
    router.post("/chat")(_chat(board))
    router.post("/chat/close")(_close(board))
    return router


def _chat(board: Board) -> Callable[..., object]:
    async def chat(body: ChatBody) -> StreamingResponse:
        """Pieces of the answer as they come, then its tokens with their probabilities."""
        path = _model_of(board, body)
        request = body.model_dump(exclude={"run", "checkpoint"}, exclude_none=True)

        async def lines() -> AsyncIterator[bytes]:
            async for event in board.conversations.answer(path, request):
                yield json.dumps(event).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return chat


def _close(board: Board) -> Callable[..., object]:
    async def close() -> Answer:
        """Close the models, and free their memory."""
        await board.conversations.close()
        return {}

    return close


def _model_of(board: Board, body: ChatBody) -> str:
    """What ``surefoot chat`` is called with. Raises ``RunError``."""
    folder = run_inside(board.root, body.run)
    if body.checkpoint == "base":
        data = parse(read_text(folder / RUN_RECIPE, follow=False), RUN_RECIPE).data
        model = data.get("model") if isinstance(data, dict) else None
        path = model.get("path") if isinstance(model, dict) else None
        if not isinstance(path, str):
            raise RunError(f"{body.run}: its recipe names no model")
        if outside := refusal(board, path, board.root):
            raise RunError(outside)
        return path
    name = f"{body.run}/{body.checkpoint}" if body.checkpoint else body.run
    return str(inside(board.root, name))
