"""Ranking rows: a conversation and two responses to its end, a chosen and a rejected one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...batch import IGNORE_INDEX, Features
from ..encoded import Dropped, Encoded, Truncated
from ..example import Example, Message
from .pairs import join

if TYPE_CHECKING:
    from .codec import Codec

UNRANKED = Dropped(
    'no chosen and no rejected response (a ranking dataset has "ranking": true in '
    "dataset_info.json)"
)
RANKED = Dropped("a ranking row, which only stage: dpo can train on")
SAME = Dropped("chosen and rejected are the same within data.cutoff_len")
NO_ROOM = Dropped("the prompt leaves no room for both responses within data.cutoff_len")


def is_ranked(example: Example) -> bool:
    """Whether it has two responses, and so no last one of its own."""
    return example.chosen is not None and example.rejected is not None


def encode_pairs(examples: Sequence[Example], codec: Codec) -> list[Encoded]:
    """Each ranking row as a pair (see ``pairs``), or why it is dropped. Both responses are
    trained; everything before them is masked. ``cutoff_len`` limits the prompt with either
    response."""
    pairs = [_conversations(example) for example in examples]
    flat = [conversation for pair in pairs for conversation in pair]
    outcomes = iter(codec.encode_chats(flat))
    return [_pair(next(outcomes), next(outcomes)) if pair else UNRANKED for pair in pairs]


def answered(example: Example, answer: Message) -> Example:
    """The conversation with ``answer`` at its end, which alone is trained."""
    before = (replace(message, learn=False) for message in example.messages)
    messages = (*before, replace(answer, learn=True))
    return replace(example, messages=messages, chosen=None, rejected=None)


def _conversations(example: Example) -> list[Example]:
    """Chosen, rejected; nothing if either is missing."""
    if example.chosen is None or example.rejected is None:
        return []
    return [answered(example, answer) for answer in (example.chosen, example.rejected)]


def _pair(chosen: Encoded, rejected: Encoded) -> Encoded:
    for outcome in (chosen, rejected):
        if isinstance(outcome, Dropped):
            return outcome
    items = [_item(outcome) for outcome in (chosen, rejected)]
    if not all(any(_trained(item)) for item in items):
        return NO_ROOM
    if list(items[0]["input_ids"]) == list(items[1]["input_ids"]):
        return SAME
    is_cut = isinstance(chosen, Truncated) or isinstance(rejected, Truncated)
    pair = [join(*items)]
    return Truncated(pair) if is_cut else pair


def _item(outcome: Encoded) -> Features:
    """The sequence that ends in the response."""
    assert not isinstance(outcome, Dropped)
    return (outcome.features if isinstance(outcome, Truncated) else outcome)[-1]


def _trained(item: Features) -> Iterator[bool]:
    return (label != IGNORE_INDEX for label in item["labels"][1:])
