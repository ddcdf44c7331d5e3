"""Items of OpenAI's Responses API: those of a request as messages, and an answer as items."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ApiError
from .response_text import TextPiece

_TEXTS = ("input_text", "output_text", "text")
Event = dict[str, object]


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of a request as messages of a conversation. Raises ``ApiError``."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    thought = ""
    for place, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _text(item.get("content") or [], place)
            continue
        message = _message(kind, item, place)
        if message["role"] == "assistant" and thought:
            message["reasoning_content"], thought = thought, ""
        is_call = bool(message.get("tool_calls"))
        if is_call and found and found[-1]["role"] == "assistant":
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


def _message(kind: object, item: Mapping[str, Any], place: int) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"), place)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        text = _text(item.get("output"), place)
        return {"role": "tool", "content": text, "tool_call_id": item.get("call_id")}
    raise ApiError(
        f"input[{place}]: items of type {str(kind)[:50]!r} are not supported", param="input"
    )


def _text(content: object, place: int) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in (*_TEXTS, "reasoning_text") or not isinstance(text, str):
            raise ApiError(f"input[{place}]: only text is supported", param="input")
        texts.append(text)
    return "".join(texts)


@dataclass(eq=False)
class OutputItems:
    """The items of an answer as they come, and the events that say so."""

    done: list[dict[str, object]] = field(default_factory=list)
    _open: str | None = None  # reasoning or message
    _id: str = ""
    _text: str = ""

    def add(self, piece: TextPiece) -> Iterator[Event]:
        """The events of a piece of the answer."""
        if piece.call is not None:
            yield from self.close()
            yield from self._call(piece.call)
            return
        kind = "message" if piece.kind == "content" else "reasoning"
        if kind != self._open:
            yield from self.close()
            yield from self._begin(kind)
        self._text += piece.text
        name = "output_text" if kind == "message" else "reasoning_text"
        yield {"type": f"response.{name}.delta", **self._at(), "delta": piece.text}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The events of the end of an item."""
        if self._open is None:
            return
        name = "output_text" if self._open == "message" else "reasoning_text"
        part = self._part(self._text)
        item = self._item(status, [part])
        yield {"type": f"response.{name}.done", **self._at(), "text": self._text}
        yield {"type": "response.content_part.done", **self._at(), "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open, self._text = None, ""

    def _begin(self, kind: str) -> Iterator[Event]:
        self._open = kind
        self._id = f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(12)}"
        item = self._item("in_progress", [])
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": item}
        part = self._part("")
        yield {"type": "response.content_part.added", **self._at(), "part": part}

    def _call(self, call: Mapping[str, object]) -> Iterator[Event]:
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        item: dict[str, object] = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": secrets.token_hex(5)[:9],
            "name": call["name"],
            "arguments": "",
            "status": "in_progress",
        }
        at = {"item_id": item["id"], "output_index": len(self.done)}
        index = {"output_index": len(self.done)}
        yield {"type": "response.output_item.added", **index, "item": item}
        name = "response.function_call_arguments"
        yield {"type": f"{name}.delta", **at, "delta": arguments}
        yield {"type": f"{name}.done", **at, "name": call["name"], "arguments": arguments}
        item = {**item, "arguments": arguments, "status": "completed"}
        yield {"type": "response.output_item.done", **index, "item": item}
        self.done.append(item)

    def _at(self) -> dict[str, object]:
        return {"item_id": self._id, "output_index": len(self.done), "content_index": 0}

    def _part(self, text: str) -> dict[str, object]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str, content: Sequence[dict[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {"type": self._open, "id": self._id, "status": status}
        is_message = self._open == "message"
        own: dict[str, object] = {"role": "assistant"} if is_message else {"summary": []}
        return {**found, **own, "content": list(content)}
