"""``/score``, ``/rerank`` and ``/v1/embeddings``: answers that are numbers."""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import JSONResponse, Response

from ...data.example import Example, Message
from ...data.rows.formats.openai import OpenAI
from ...errors import DataError
from ...inference.scoring import score
from ..answers.prompt_ids import prompts_of
from ..answers.usage import usage_of
from ..body import Body, Prompts, Texts, post, read
from ..errors import ApiError
from ..running.models import ServedModel
from ..server_state import ServerState, unless_gone

MOST = 2048  # texts of a request
Text = str | Texts


class ScoreBody(Body):
    """Prompts and responses: one prompt for all responses, or one for each; or conversations."""

    text_1: Text | None = None
    text_2: Text | None = None
    messages: list[dict[str, Any]] | list[list[dict[str, Any]]] | None = None


class RerankBody(Body):
    """A prompt, and responses to be put in order."""

    query: str
    documents: list[str] = Field(min_length=1, max_length=MOST)
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool | None = None


class EmbeddingsBody(Body):
    """Texts or token ids."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


def routes(state: ServerState) -> APIRouter:
    """The addresses of numbers."""
    router = APIRouter()
    for path in ("/score", "/v1/score"):
        post(router, path, ScoreBody, _score(state))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        post(router, path, RerankBody, _rerank(state))
    post(router, "/v1/embeddings", EmbeddingsBody, _embeddings(state))
    return router


def _score(state: ServerState) -> Callable[..., object]:
    async def scores(body: Annotated[ScoreBody, read(ScoreBody)], http: HttpRequest) -> Response:
        """The reward of each response by a reward model."""
        model = await _reward_model(state, body.model)
        found = await unless_gone(http, _rewards(state, model, _examples(body)))
        if isinstance(found, Response):
            return found
        data = [
            {"index": index, "object": "score", "score": value} for index, value in enumerate(found)
        ]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "model": model.name}
        return JSONResponse({**head, "data": data})

    return scores


def _rerank(state: ServerState) -> Callable[..., object]:
    async def rerank(body: Annotated[RerankBody, read(RerankBody)], http: HttpRequest) -> Response:
        """Responses to a prompt in the order of their rewards, the highest first."""
        model = await _reward_model(state, body.model)
        examples = [_example(body.query, text) for text in body.documents]
        found = await unless_gone(http, _rewards(state, model, examples))
        if isinstance(found, Response):
            return found
        order = sorted(range(len(found)), key=lambda index: -found[index])
        has_texts = body.return_documents is not False
        results = [
            {
                "index": index,
                "relevance_score": found[index],
                **({"document": {"text": body.documents[index]}} if has_texts else {}),
            }
            for index in order[: body.top_n]
        ]
        head = {"id": f"rerank-{secrets.token_hex(12)}", "model": model.name}
        return JSONResponse({**head, "results": results})

    return rerank


def _embeddings(state: ServerState) -> Callable[..., object]:
    async def embeddings(
        body: Annotated[EmbeddingsBody, read(EmbeddingsBody)], http: HttpRequest
    ) -> Response:
        """The state of the last layer at the last token of each text, of length 1."""
        if body.dimensions is not None:
            raise ApiError(
                "dimensions: this model has one size; leave it unset", param="dimensions"
            )
        model = await state.models.get(body.model)
        prompts = await asyncio.to_thread(prompts_of, model, body.input, "input")
        if len(prompts) > MOST:
            raise ApiError(f"input: at most {MOST:,} texts", param="input")
        found = await unless_gone(http, _all_embedded(state, model, prompts))
        if isinstance(found, Response):
            return found
        data = [
            {"object": "embedding", "index": index, "embedding": _written(body, vector)}
            for index, vector in enumerate(found)
        ]
        count = sum(map(len, prompts))
        usage = {name: usage_of(count, 0)[name] for name in ("prompt_tokens", "total_tokens")}
        answer = {"object": "list", "data": data, "model": model.name, "usage": usage}
        return JSONResponse(answer)

    return embeddings


async def _all_embedded(
    state: ServerState, model: ServedModel, prompts: Sequence[Sequence[int]]
) -> list[list[float]]:
    return [await state.compute(model, partial(_embedded, model, ids)) for ids in prompts]


@torch.no_grad()
def _embedded(model: ServedModel, ids: Sequence[int]) -> list[float]:
    inner = model.opened.inner
    asked = torch.tensor([list(ids)], device=inner.device)
    states = inner.base_model(input_ids=asked, use_cache=False).last_hidden_state
    vector = states[0, -1].float()
    found: list[float] = (vector / vector.norm()).tolist()
    return found


def _written(body: EmbeddingsBody, vector: Sequence[float]) -> list[float] | str:
    if body.encoding_format != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def _reward_model(state: ServerState, name: str | None) -> ServedModel:
    found = await state.models.get(name)
    if found.opened.network.heads.values is None:
        raise ApiError(
            f"{found.name!r} is no reward model; serve one that was trained with stage: rm",
            param="model",
        )
    return found


async def _rewards(
    state: ServerState, model: ServedModel, examples: Sequence[Example]
) -> list[float]:
    size = state.settings.max_batch
    found = await state.compute(model, lambda: score(model.opened, examples, batch_size=size))
    return [one["reward"] for one in found]


def _example(prompt: str, response: str) -> Example:
    return Example((Message("user", prompt), Message("assistant", response)))


def _examples(body: ScoreBody) -> list[Example]:
    """The conversations of a request."""
    if body.messages is not None and body.text_1 is None and body.text_2 is None:
        return [_conversation(one) for one in _conversations(body.messages)]
    if body.text_1 is None or body.text_2 is None or body.messages is not None:
        raise ApiError("expected text_1 and text_2, or messages", param="text_1")
    responses = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    prompts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    if len(prompts) == 1:
        prompts = prompts * len(responses)
    if not responses or len(prompts) != len(responses) or len(responses) > MOST:
        raise ApiError(
            f"text_1 has {len(prompts):,} texts and text_2 {len(responses):,}; expected one for "
            f"each response, or one for all, and at most {MOST:,} responses",
            param="text_1",
        )
    return [_example(*pair) for pair in zip(prompts, responses, strict=True)]


def _conversations(messages: Sequence[Any]) -> Sequence[Any]:
    is_one = bool(messages) and isinstance(messages[0], dict)
    return [messages] if is_one else messages


def _conversation(messages: Sequence[Any]) -> Example:
    try:
        found = OpenAI().read({"messages": list(messages)})
    except DataError as error:
        raise ApiError(f"messages: {error}", param="messages") from None
    if found.messages[-1].role != "assistant":
        raise ApiError("messages: the last one must be of the assistant", param="messages")
    return found
