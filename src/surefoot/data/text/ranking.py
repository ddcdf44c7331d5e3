"""Ranking rows, a conversation and two responses to its end, and rows with a mark: which responses
must not be imitated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError
from ..example import EMPTY, Dropped, Encoded, Example, Message, Truncated, items_of
from ..rows.formats.fields import MARKS, truth
from .collation import join, num_trained, pictures_of

if TYPE_CHECKING:
    from .codec import Codec


UNRANKED = Dropped(
    'no chosen and no rejected response (a ranking dataset has "ranking": true in '
    "dataset_info.json)"
)
RANKED = Dropped("a ranking row, which only stage: dpo and rm can train on")
UNDESIRABLE = Dropped("marked undesirable (kto_tag: false), which only stage: kto can train on")
EQUAL = Dropped("chosen and rejected are equal, so neither can be preferred")
SAME = Dropped("chosen and rejected are the same within data.cutoff_len")
NO_ROOM = Dropped("the prompt leaves no room for both responses within data.cutoff_len")


def is_ranked(example: Example) -> bool:
    """Whether it has two responses, and so no last one of its own."""
    return example.chosen is not None and example.rejected is not None


def labeled(example: Example) -> Example:
    """The example with the label of its row, where no entry names the column: ``label`` or
    ``kto_tag`` with true or false, 1 or 0, or these as text."""
    if example.label is not None:
        return example
    labels = (truth(example.columns.get(name)) for name in MARKS)
    return replace(example, label=next((each for each in labels if each is not None), None))


def not_to_imitate(example: Example) -> Dropped | None:
    """Why an example must not be imitated; None if it may. Raises ``DataError``: its row seems to
    say that, in a column that its entry does not read."""
    if example.unread_mark:
        raise DataError(
            f"{example.origin}: the column {example.unread_mark!r} seems to mark good and bad "
            f'responses; add "columns": {{"kto_tag": "{example.unread_mark}"}} to the entry of '
            'the dataset to train on the good ones only, or {"kto_tag": null} if it means '
            "something else"
        )
    if is_ranked(example):
        return RANKED
    return UNDESIRABLE if example.label is False else None


def encode_pairs(examples: Sequence[Example], codec: Codec) -> list[Encoded]:
    """Each ranking row as a pair (see ``pairs``), or why it is dropped. Both responses are
    trained; everything before them is masked. ``cutoff_len`` limits the prompt with either
    response."""
    reasons = [_why_no_pair(example) for example in examples]
    good = [example for example, why in zip(examples, reasons, strict=True) if not why]
    flat = [conversation for example in good for conversation in _conversations(example)]
    outcomes = iter(codec.encode_chats(flat))
    return [why or _pair(next(outcomes), next(outcomes)) for why in reasons]


def answered(example: Example, answer: Message) -> Example:
    """The conversation with ``answer`` at its end, which alone is trained."""
    before = (replace(message, learn=False) for message in example.messages)
    messages = (*before, replace(answer, learn=True))
    return replace(example, messages=messages, chosen=None, rejected=None)


def up_to_last_label(item: Features) -> Features:
    """A conversation without what its template writes after the end token of its response."""
    last = max(i for i, label in enumerate(item["labels"]) if label != IGNORE_INDEX)
    cut = {name: item[name][: last + 1] for name in ("input_ids", "labels")}
    return {**cut, **pictures_of(item)}  # which stand before the response


def _why_no_pair(example: Example) -> Dropped | None:
    if example.chosen is None or example.rejected is None:
        return UNRANKED
    if example.chosen == example.rejected:
        return EQUAL
    return EMPTY if example.chosen.is_empty or example.rejected.is_empty else None


def _conversations(example: Example) -> list[Example]:
    """Chosen, rejected."""
    answers = (example.chosen, example.rejected)
    return [answered(example, answer) for answer in answers if answer is not None]


def _pair(chosen: Encoded, rejected: Encoded) -> Encoded:
    for outcome in (chosen, rejected):
        if isinstance(outcome, Dropped):
            return outcome
    items = [items_of(outcome)[-1] for outcome in (chosen, rejected)]  # which end in the response
    if not all(num_trained(item) for item in items):
        return NO_ROOM
    if list(items[0]["input_ids"]) == list(items[1]["input_ids"]):
        return SAME
    is_cut = isinstance(chosen, Truncated) or isinstance(rejected, Truncated)
    pair = [join(*items)]
    return Truncated(pair) if is_cut else pair
