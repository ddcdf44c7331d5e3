"""The labels of a rendered conversation: which of its tokens are trained, and where it may end.

One sequence carries as many responses as it can. A response needs a sequence of its own if later
turns change its rendering (they may remove its thought), or if the tokenizer merges its first
characters with its prompt: in the common sequence it would follow other ids than chat gives it.
``Codec.encode_chats`` calls this after the texts of a batch are tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...batch import IGNORE_INDEX, Features
from ..media.files import Seen
from ._tokenization import Bounds, RenderedText, Tokenization, Tokens
from .templates._response_spans import ResponseSpan


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """The text of a conversation, and the spans in it that decide its labels.

    Either ``responses`` and ``trained`` have labels and nothing else; or, with
    ``train_on_prompt``, all of the text but ``masked`` has, and ``responses`` are all responses,
    behind which it may be truncated.
    """

    text: RenderedText
    responses: Sequence[ResponseSpan] = ()
    trained: Sequence[ResponseSpan] = ()  # contents of other messages
    masked: Sequence[ResponseSpan] = ()
    pictures: Sequence[Seen] = ()  # in the order of their placeholders


@dataclass(frozen=True, slots=True)
class LabeledSequence:
    """Token ids and their labels, which may be truncated behind one of ``answers``, in order."""

    ids: list[int]
    labels: list[int]
    answers: Sequence[Bounds]  # of the responses, in tokens

    @property
    def features(self) -> Features:
        """As the cache stores it."""
        return {"input_ids": self.ids, "labels": self.labels}

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens with a label."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)

    def truncated(self, length: int) -> LabeledSequence | None:
        """At most ``length`` tokens: up to the last response that fits, or the beginning of the
        first one; None if its prompt leaves no room for it."""
        if len(self.ids) <= length:
            return self
        if ends := [end for _, end in self.answers if end <= length]:
            return self.first(ends[-1])
        if self.answers and self.answers[0][0] < length:
            return self.first(length)
        return None

    def first(self, length: int) -> LabeledSequence:
        """Its first ``length`` tokens."""
        return replace(self, ids=self.ids[:length], labels=self.labels[:length])


def label_text(
    rendered: RenderedConversation, tokens: Tokens, tokenization: Tokenization
) -> LabeledSequence:
    """All tokens of a conversation as labels, except those of ``rendered.masked``."""
    labels = list(tokens.ids)
    for start, end in _token_bounds(rendered.masked, rendered, tokens, tokenization):
        labels[start:end] = [IGNORE_INDEX] * (end - start)
    answers = _token_bounds(_in_text(rendered), rendered, tokens, tokenization)
    return LabeledSequence(tokens.ids, labels, answers)


def label_responses(
    rendered: RenderedConversation,
    tokens: Tokens,
    tokenization: Tokenization,
    last_ends: Sequence[int] = (),
) -> list[LabeledSequence]:
    """The sequence of all responses that keep their prompt in it, then one for each other.

    ``last_ends`` are tokens that end a response and are written after the last one only, as
    GLM's, whose turns end where the role of the next one begins. The first token behind every
    other response gets one of them as its label: itself if it is one, else the first of them.
    """
    in_text = _in_text(rendered)
    spans = [(response.start, response.end) for response in in_text]
    bounds = tokenization.bounds(tokens, rendered.text, spans, behind_prompt=True)
    answers = [pair for pair in bounds if pair]
    separate: list[LabeledSequence] = []
    if len(answers) < len(rendered.responses):
        placed = {response for response, pair in zip(in_text, bounds, strict=True) if pair}
        separate = [
            _label_alone(response, rendered, tokenization)
            for response in rendered.responses
            if response not in placed
        ]
    trained = [*answers, *_token_bounds(rendered.trained, rendered, tokens, tokenization)]
    if not trained:
        return separate
    ids, labels = tokens.ids, [IGNORE_INDEX] * len(tokens.ids)
    for start, end in trained:
        labels[start:end] = ids[start:end]
    if last_ends:
        for number, (start, end) in enumerate(answers):
            if end < len(ids) and ids[end - 1] not in last_ends:
                labels[end] = ids[end] if ids[end] in last_ends else last_ends[0]
                answers[number] = (start, end + 1)  # truncation keeps the label
    sequence = LabeledSequence(ids, labels, answers)
    if separate:  # what follows the last label is trained in the others
        sequence = sequence.first(max(end for _, end in [*trained, *answers]))
    return [sequence, *separate]


def _label_alone(
    response: ResponseSpan, rendered: RenderedConversation, tokenization: Tokenization
) -> LabeledSequence:
    """One response behind its prompt, as chat encodes it."""
    text = RenderedText(response.text, rendered.text.marked)
    prompt = tokenization.encode([text[: response.start]])[0].ids
    answer = tokenization.encode_after(text[response.start : response.end])
    ids = prompt + answer
    labels = [IGNORE_INDEX] * len(prompt) + answer
    return LabeledSequence(ids, labels, [(len(prompt), len(ids))])


def _in_text(rendered: RenderedConversation) -> list[ResponseSpan]:
    """The responses that are located in the text of the conversation, not in one of their own."""
    return [span for span in rendered.responses if span.text is rendered.text.text]


def _token_bounds(
    spans: Sequence[ResponseSpan],
    rendered: RenderedConversation,
    tokens: Tokens,
    tokenization: Tokenization,
) -> list[Bounds]:
    """The tokens that have a character of each span, as transformers' ``char_to_token`` counts
    them: the first token of a message may cover the space before it, too."""
    if not spans:  # as nearly always, and bounds begin with a search of the text
        return []
    characters = [(span.start, span.end) for span in spans]
    bounds = tokenization.bounds(tokens, rendered.text, characters)
    pairs = [
        pair or tokens.overlapping(*span) for pair, span in zip(bounds, characters, strict=True)
    ]
    return [pair for pair in pairs if pair]
