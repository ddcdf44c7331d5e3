"""A rendered conversation as sequences of token ids and labels, which can be truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...batch import IGNORE_INDEX, Features
from .templates.response_spans import ResponseSpan
from .tokenization import Bounds, RenderedText, Tokenization, Tokens


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """The text of a conversation, and its response spans."""

    text: RenderedText
    turns: Sequence[
        ResponseSpan
    ]  # the answers to learn; all answers where the whole text is learnt
    parts: Sequence[ResponseSpan]  # contents to learn beside them; or not to learn, of a whole text


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of token ids and labels, which may be truncated at its ``answers``, in order."""

    ids: list[int]
    labels: list[int]
    answers: Sequence[Bounds]

    @property
    def features(self) -> Features:
        """As the cache stores it."""
        return {"input_ids": self.ids, "labels": self.labels}

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens with a label."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)

    def fit(self, length: int) -> Item | None:
        """Truncate to the last response that fits, or else the first response."""
        if len(self.ids) <= length:
            return self
        if ends := [end for _, end in self.answers if end <= length]:
            return self.cut(ends[-1])
        if self.answers and self.answers[0][0] < length:
            return self.cut(length)
        return None

    def cut(self, end: int) -> Item:
        """Its first ``end`` tokens."""
        return replace(self, ids=self.ids[:end], labels=self.labels[:end])


def whole(rendered: RenderedConversation, tokens: Tokens, tokenization: Tokenization) -> Item:
    """A conversation as one trained text, except the messages that are masked."""
    labels = list(tokens.ids)
    for start, end in _bounds(rendered, tokens, tokenization, rendered.parts):
        labels[start:end] = [IGNORE_INDEX] * (end - start)
    inside = [turn for turn in rendered.turns if turn.text is rendered.text.text]
    return Item(tokens.ids, labels, _bounds(rendered, tokens, tokenization, inside))


def split(
    rendered: RenderedConversation,
    tokens: Tokens,
    tokenization: Tokenization,
    last_ends: Sequence[int] = (),
) -> list[Item]:
    """One sequence for all responses whose prompt stays the same later, then one for each other.

    ``last_ends`` are the tokens that end a response, and are written after the last one only. One
    of them is the label of the first token behind every other one: this token itself, if it is one
    of them, such as the role of the next turn; else the first of them.
    """
    inside = [turn for turn in rendered.turns if turn.text is rendered.text.text]
    spans = [(turn.start, turn.end) for turn in inside]
    found = tokenization.bounds(tokens, rendered.text, spans, behind_prompt=True)
    answers = [bounds for bounds in found if bounds]
    own: list[Item] = []
    if len(answers) < len(rendered.turns):
        placed = {turn for turn, bounds in zip(inside, found, strict=True) if bounds}
        others = [turn for turn in rendered.turns if turn not in placed]
        own = [_alone(rendered, tokenization, turn) for turn in others]
    learnt = answers
    if rendered.parts:
        learnt = [*answers, *_bounds(rendered, tokens, tokenization, rendered.parts)]
    if not learnt:
        return own
    labels = [IGNORE_INDEX] * len(tokens.ids)
    for start, end in learnt:
        labels[start:end] = tokens.ids[start:end]
    if last_ends:
        for i, (start, end) in enumerate(answers):
            if end < len(labels) and tokens.ids[end - 1] not in last_ends:
                labels[end] = tokens.ids[end] if tokens.ids[end] in last_ends else last_ends[0]
                answers[i] = (start, end + 1)  # a cut keeps the label
    item = Item(tokens.ids, labels, answers)
    return [item.cut(max(end for _, end in [*learnt, *answers])) if own else item, *own]


def _alone(rendered: RenderedConversation, tokenization: Tokenization, turn: ResponseSpan) -> Item:
    """A sequence for one response: its prompt as chat encodes it, then the response."""
    text = RenderedText(turn.text, rendered.text.marked)
    prompt = tokenization.encode([text[: turn.start]])[0].ids
    answer = tokenization.encode_after(text[turn.start : turn.end])
    ids = prompt + answer
    return Item(ids, [IGNORE_INDEX] * len(prompt) + answer, [(len(prompt), len(ids))])


def _bounds(
    rendered: RenderedConversation,
    tokens: Tokens,
    tokenization: Tokenization,
    turns: Sequence[ResponseSpan],
) -> list[Bounds]:
    """The response spans that begin and end at token boundaries."""
    spans = [(turn.start, turn.end) for turn in turns]
    return [bounds for bounds in tokenization.bounds(tokens, rendered.text, spans) if bounds]
