"""What is odd about a single row: the order of its turns, and the text of its response; and the
hashes by which rows are compared."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import xxhash

from ...data.example import Example, Message

MEDIA = ("<image>", "<video>", "<audio>")
LOOP_LENGTH, LOOP_RATIO = 400, 0.08  # bytes of a response, and its compressed size at most
NO_END = "conversations that do not end with a response"
FIRST = "conversations that begin with a response"
TWICE = "conversations with two turns of one role in a row"
LATE = "system messages after the first turn"
ALONE = "results of functions without a call before"
PLACEHOLDER = "placeholders without a picture in the text"
CONTROL = "special tokens of the model in the text"
LOOP = "responses that repeat themselves"
ECHO = "responses equal to the prompt"


def hashes_of(example: Example) -> tuple[int, int, int]:
    """The hashes of a row: of everything, of its prompt, and of its response."""
    if example.text is not None:
        texts = (example.text, example.text, "")
    else:
        messages, response = example.messages, response_of(example)
        before = messages if example.chosen or not _ends(messages) else messages[:-1]
        tools = json.dumps(example.tools, sort_keys=True, default=str) if example.tools else ""
        prompt = "\0".join([tools, *map(_written, before)])
        answers = [_written(answer) if answer else "" for answer in (response, example.rejected)]
        whole = "\1".join([prompt, *answers, str(example.label)])
        texts = (whole, prompt, response.content if response else "")
    of_whole, of_prompt, of_response = (
        xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) for text in texts
    )
    return of_whole, of_prompt, of_response


def response_of(example: Example) -> Message | None:
    """The response of a row; of a pair, the chosen one."""
    if example.chosen is not None:
        return example.chosen
    return example.messages[-1] if _ends(example.messages) else None


def oddities(example: Example, specials: Sequence[str], *, needs_response: bool) -> Iterator[str]:
    """What is odd about a row. ``specials`` are the special tokens of the model."""
    messages = example.messages
    contents = [message.content for message in messages] if messages else [example.text or ""]
    if any(mark in content for content in contents for mark in MEDIA):
        yield PLACEHOLDER
    if any(mark in content for content in contents for mark in specials):
        yield CONTROL
    if example.text is not None:
        return
    if needs_response and example.chosen is None and not _ends(messages):
        yield NO_END
    yield from _order(messages)
    response = response_of(example)
    if response is None:
        return
    if is_loop(response.content):
        yield LOOP
    prompts = [message.content.strip() for message in messages if message.role == "user"]
    if response.content.strip() and prompts and prompts[-1] == response.content.strip():
        yield ECHO


def is_loop(text: str) -> bool:
    """Whether a text says the same again and again: it is long, and compresses to next to
    nothing."""
    data = text.encode(errors="replace")
    return len(data) >= LOOP_LENGTH and len(zlib.compress(data, 1)) < LOOP_RATIO * len(data)


def _order(messages: Sequence[Message]) -> Iterator[str]:
    roles = [message.role for message in messages]
    turns = [role for role in roles if role != "system"]
    if turns and turns[0] == "assistant":
        yield FIRST
    if "system" in roles[1:]:
        yield LATE
    if any(role == following != "tool" for role, following in pairwise(turns)):
        yield TWICE
    if any(
        message.role == "tool" and before.role not in ("assistant", "tool")
        for before, message in pairwise(messages)
    ):
        yield ALONE


def _ends(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].role == "assistant"


def _written(message: Message) -> str:
    pairs = [(call["name"], call["arguments"]) for call in message.tool_calls]  # ids may differ
    calls = json.dumps(pairs, sort_keys=True, default=str)
    pictures = "".join(f"\2{picture!r}" for picture in message.media)
    return f"{message.role}:{message.content}{calls if message.tool_calls else ''}{pictures}"
