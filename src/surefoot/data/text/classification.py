"""Rows for a classifier: what it reads of each. It scores the last token of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...batch import IGNORE_INDEX, Features
from ..example import Dropped, Encoded, Example, Truncated, items_of
from .ranking import RANKED, answered, is_ranked, up_to_last_label

if TYPE_CHECKING:
    from .codec import Codec

ONLY_IDS = Dropped("token ids, which do not say where a text ends; store the text")
NO_TEMPLATE = Dropped(
    "a conversation, and the tokenizer has no chat template; set data.template, or give it as text"
)
NOTHING = Dropped("no text, and no conversation")


def encode_inputs(examples: Sequence[Example], codec: Codec) -> list[Encoded]:
    """What a classifier reads of each row: a plain text as the tokenizer encodes it by itself, a
    conversation as the chat template renders it, up to the beginning of the next response or, if it
    ends in a response, up to the end token of that. Its last token alone has a label."""
    reasons = [_why_not(example, codec) for example in examples]
    kinds = [None if why else _kind(each) for each, why in zip(examples, reasons, strict=True)]

    def of_kind(kind: str) -> list[Example]:
        return [each for each, k in zip(examples, kinds, strict=True) if k == kind]

    outcomes = {
        "text": iter(codec.encode_texts([str(each.text) for each in of_kind("text")])),
        "question": iter(codec.encode_prompts(of_kind("question"))),
        "answered": iter(_encode_answered(of_kind("answered"), codec)),
    }
    return [
        why or _scored_at_its_end(next(outcomes[str(kind)]), is_answered=kind == "answered")
        for why, kind in zip(reasons, kinds, strict=True)
    ]


def _encode_answered(examples: Sequence[Example], codec: Codec) -> list[Encoded]:
    return codec.encode_chats([_last_answer(example) for example in examples]) if examples else []


def _why_not(example: Example, codec: Codec) -> Dropped | None:
    if example.token_ids is not None:
        return ONLY_IDS
    if is_ranked(example):
        return RANKED
    if not (example.text or example.messages):
        return NOTHING
    return None if example.text or codec.template_text else NO_TEMPLATE


def _kind(example: Example) -> str:
    if example.text:
        return "text"
    return "answered" if example.messages[-1].role == "assistant" else "question"


def _last_answer(example: Example) -> Example:
    *before, last = example.messages
    return answered(replace(example, messages=tuple(before)), last)


def _scored_at_its_end(outcome: Encoded, *, is_answered: bool) -> Encoded:
    if isinstance(outcome, Dropped):
        return outcome
    (item,) = items_of(outcome)[-1:]
    if is_answered and not isinstance(outcome, Truncated):
        item = up_to_last_label(item)
    ids = item["input_ids"]
    labels = [*[IGNORE_INDEX] * (len(ids) - 1), ids[-1]]
    scored: list[Features] = [{**item, "labels": labels}]
    return Truncated(scored) if isinstance(outcome, Truncated) else scored
