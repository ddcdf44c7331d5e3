"""The thoughts of responses: between a template's own words, or in a field of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..example import THOUGHT_KEYS, Message

Words = tuple[str, str]  # before and after a thought
USUAL: Words = ("<think>\n", "\n</think>\n\n")


def split_thought(message: Message, words: Words) -> Message:
    """A thought that begins a response, with exactly these words around it, in its own field."""
    first, last = words
    if message.role != "assistant" or message.reasoning or not message.content.startswith(first):
        return message
    thought, found, content = message.content[len(first) :].partition(last)
    return replace(message, reasoning=thought, content=content) if found else message


def lone_close(message: Message, words: Words) -> re.Match[str] | None:
    """The closing word of a response's thought that has no opening word; None if there is none, or
    if it is quoted."""
    first, last = (word.strip() for word in words)
    if message.role != "assistant" or message.reasoning or last not in message.content:
        return None
    found = re.search(rf"(?<![`'\"“‘(]){re.escape(last)}", message.content)
    return None if found is None or first in message.content[: found.start()] else found


def is_unclear(message: Message, words: Words) -> bool:
    """Whether a lone closing word may end a thought or be text: it has blanks around it."""
    found = lone_close(message, words)
    if found is None:
        return False
    around = message.content[max(0, found.start() - 1) : found.end() + 1]
    return around == f" {found[0]} "


def with_opening(message: Message, words: Words) -> Message:
    """A response whose thought the prompt had opened (servers log it so), with both words."""
    found = lone_close(message, words)
    if found is None or is_unclear(message, words):
        return message
    if not message.content[: found.start()].strip():  # an empty thought, which is none
        return replace(message, content=message.content[found.end() :].lstrip("\n"))
    return replace(message, content=words[0] + message.content.lstrip("\n"))


def answer_in(content: str) -> str:
    """What a response says after its thought, if the thought is in the content."""
    before, closed, after = content.partition("</think>")
    return after if closed and "<think>" in before else content


def without_thought(message: Message, words: Words) -> Message:
    """A response without its thought."""
    if message.role != "assistant":
        return message
    first, last = (re.escape(word.strip()) for word in words)
    content = re.sub(rf"\A\s*{first}.*?{last}\s*", "", message.content, flags=re.DOTALL)
    return replace(message, reasoning="", content=content)


def with_thought(message: Message, words: Words = USUAL) -> str:
    """What a response says, its thought in front."""
    if not message.reasoning:
        return message.content
    return words[0] + message.reasoning + words[1] + message.content


def field_of(source: str) -> str | None:
    """The field of a message that a template reads thoughts from."""
    found = (name for name in THOUGHT_KEYS if re.search(rf"[.'\"]{name}\b", source))
    return next(found, None)


def end_of_thought(text: str, start: int, end: int, words: Words, *, only_empty: bool) -> int:
    """Where a response's answer begins in ``text[start:end]``; ``start`` if it has no thought, or
    has one and ``only_empty``."""
    first, last = words
    for close in (last, last.strip()):
        place = text.find(close, start, end)
        if place >= 0:
            thought = text[start:place].replace(first.strip(), "", 1)
            return start if only_empty and thought.strip() else place + len(close)
    return start


def thought_of(fields: Sequence[object], content: str) -> str:
    """The thought of a message as a template sees it, without white space around it."""
    given = next((str(each) for each in fields if each), "")
    if not given:
        before, closed, _ = content.partition("</think>")
        given = before.partition("<think>")[2] if closed else ""
    return given.strip()
