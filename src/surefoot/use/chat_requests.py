"""Conversations of another program: one request per line, answered by events.

A request has the whole conversation, so nothing is remembered between two of them. The last event
of an answer has its tokens, with the probability that the model gives each, and the most probable
ones in its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..data.example import JSON, Message
from ..data.rows.formats.fields import tools
from ..errors import DataError, RecipeError, RunError, SurefootError
from ..generate.responses import TextStream, decoder
from ..generate.section import GenerateSection, with_options
from .conversation import Answer, Conversation, answer_of
from .model_loading import LoadedModel

Event = Mapping[str, object]
SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "greedy",
)
NUM_ALTERNATIVES = 5
_ROLES = (("user", "tool"), ("assistant",))  # in turn; a tool gives the result of a call


def events(
    conversation: Conversation, line: str, on_event: Callable[[Event], None]
) -> Iterator[Event]:
    """Answer the request in ``line``: pieces go to ``on_event`` as they are generated, the end of
    the answer, or what is wrong, is returned."""
    try:
        request = _parsed(line)
        asked, last = _prepared(conversation, request), request["messages"][-1]
        answer = asked.ask(
            last["content"],
            lambda piece: on_event({"event": "piece", "text": piece}),
            role=last["role"],
        )
        tokens = token_probabilities(asked.opened, answer)
    except SurefootError as error:
        yield {"event": "error", "message": str(error)}
        return
    yield {
        "event": "answer",
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "tool_calls": list(answer.tool_calls),
        "broken_calls": list(answer.broken_calls),
        "prompt_tokens": len(answer.prompt_ids),
        "tokens": tokens,
    }


@torch.no_grad()
def token_probabilities(opened: LoadedModel, answer: Answer) -> list[dict[str, object]]:
    """Pieces of the response's text, each with the probability of its tokens given all before, and
    the most probable tokens instead of its last one. Sampling settings have no part in it. A stop
    text is not shown."""
    if not answer.ids:
        return []
    device = next(opened.model.parameters()).device
    ids = torch.tensor([[*answer.prompt_ids, *answer.ids]], device=device)
    count = len(answer.ids)
    logits_TV = opened.model(input_ids=ids).logits[0, -count - 1 : -1].float()
    logps_TV = logits_TV.log_softmax(-1)
    top = logps_TV.topk(min(NUM_ALTERNATIVES, logps_TV.shape[-1]))
    decode = decoder(opened.tokenizer)
    text, logp, left = TextStream(decode), 0.0, len(answer.text)
    found: list[dict[str, object]] = []
    for place, token in enumerate(answer.ids):
        logp += float(logps_TV[place, token])
        piece = text.push(token) or (text.end() if place == count - 1 else "")
        piece, left = piece[:left], left - len(piece[:left])
        if piece:
            pairs = zip(top.indices[place].tolist(), top.values[place].tolist(), strict=True)
            instead = [[decode([other]), _share(value)] for other, value in pairs]
            found.append({"text": piece, "probability": _share(logp), "instead": instead})
            logp = 0.0
    return found


def _share(logp: float) -> float | None:
    return round(math.exp(logp), 6) if math.isfinite(logp) else None


def _parsed(line: str) -> dict[str, Any]:
    """The request. Raises ``RunError``."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise RunError("the request is not JSON") from None
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RunError("the request has no messages")
    for number, message in enumerate(messages):
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        roles = _ROLES[number % 2]
        if not is_message or message.get("role") not in roles:
            raise RunError(
                f"messages[{number}]: expected a content and the role {' or '.join(roles)}"
            )
    if messages[-1]["role"] == "assistant":
        raise RunError("the last message is not of the user or a tool")
    return dict(request)


def _prepared(conversation: Conversation, request: Mapping[str, Any]) -> Conversation:
    """The conversation as it is before its last message."""
    seed, system = request.get("seed"), request.get("system")
    if not (seed is None or type(seed) is int):
        raise RunError("seed: expected an integer")
    if not (system is None or isinstance(system, str)):
        raise RunError("system: expected text")
    asked = replace(
        conversation,
        section=_settings(conversation.section, request),
        system=system or None,
        seed=seed,
        messages=[],
        tools=_tools(request) or conversation.tools,
    )
    for number, one in enumerate(request["messages"]):
        if one["role"] == "tool" and not (asked.messages and asked.messages[-1].tool_calls):
            raise RunError(f"messages[{number}]: the response before it calls no tool")
        asked.messages.append(_message(asked, one))
    del asked.messages[-1]
    return asked


def _message(asked: Conversation, one: Mapping[str, Any]) -> Message:
    """A message of a request; an earlier response with the calls of tools that its text has."""
    if one["role"] != "assistant":
        return asked.said(one["role"], one["content"])
    return asked.as_message(answer_of(asked.opened, one["content"], "stop", asked.tools))


def _tools(request: Mapping[str, Any]) -> tuple[JSON, ...]:
    """The schemas of functions that the model may call: a list, or its text."""
    try:
        return tools(request, "tools")
    except DataError as error:
        raise RunError(str(error).replace("column 'tools'", "tools")) from None


def _settings(section: GenerateSection, request: Mapping[str, Any]) -> GenerateSection:
    options = {name: request[name] for name in SETTINGS if request.get(name) is not None}
    for name, value in options.items():
        if type(value) not in (int, float, bool):
            raise RunError(f"{name}: expected a number")
    stop = request.get("stop")
    if stop is not None:
        if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
            raise RunError("stop: expected a list of texts")
        options["stop"] = tuple(stop)
    try:
        return with_options(section, options)
    except (ValueError, TypeError) as error:
        raise RecipeError(str(error)) from None
