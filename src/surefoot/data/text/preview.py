"""An encoded example as a person reads it: its text in spans that are trained on or masked, and how
many tokens it has.

It is decoded from the ids and labels that training gets, so a preview shows what is trained on and
not what a template was meant to render. Names of fields are keys of ``surefoot preview --json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ...batch import IGNORE_INDEX, Features
from ...errors import counted
from ...terminal_text import one_line
from ..example import Dropped, Encoded, Example, Truncated, items_of
from ..media.files import Seen, seen_in
from .codec import Codec
from .collation import num_trained


@dataclass(frozen=True)
class TextSpan:
    """A span of text that is trained or masked; for a pair, also the response that contains it."""

    text: str
    learnt: bool
    answer: str | None = None  # chosen or rejected
    picture: str = ""  # that stands here, small, as a data URL


@dataclass(frozen=True)
class RenderedExample:
    """One sequence of an example."""

    parts: Sequence[TextSpan]
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class PreviewExample:
    """One example and its outcome."""

    origin: str
    tokens: int  # before anything was cut
    cut: bool
    dropped: str | None
    items: Sequence[RenderedExample]

    @property
    def outcome(self) -> str:
        """Its tokens, and how many are trained, or why it is dropped."""
        if self.dropped:
            return f"dropped: {self.dropped}"
        tokens = counted(sum(item.tokens for item in self.items), "token")
        trained = sum(item.trained_tokens for item in self.items)
        cut = f", truncated from {self.tokens:,}" if self.cut else ""
        several = f" in {len(self.items)} sequences" if len(self.items) > 1 else ""
        return f"{tokens}{cut}{several}, {trained:,} trained"


def preview_example(
    codec: Codec, example: Example, outcome: Encoded, untruncated: Encoded
) -> PreviewExample:
    """An example as it is trained on; ``untruncated`` is its outcome without a limit of length.
    Raises ``DataError``: a picture has changed since it was encoded."""
    return PreviewExample(
        origin=example.origin,
        tokens=sum(len(item["input_ids"]) for item in items_of(untruncated)),
        cut=isinstance(outcome, Truncated),
        dropped=outcome.reason if isinstance(outcome, Dropped) else None,
        items=[
            RenderedExample(_spans(codec, item), len(item["input_ids"]), num_trained(item))
            for item in items_of(outcome)
        ],
    )


_SPANS, _LENGTH = 8, 240  # of a line: spans, and characters of each


def as_line(codec: Codec, item: Features) -> str:
    """An encoded sequence in one line: what is trained on stands in ``[[ ]]``, and long spans
    without their middle. Raises ``DataError`` as above."""
    spans, parts, answer = _spans(codec, item), list[str](), None
    for span in spans[:_SPANS]:
        text, half = span.text, _LENGTH // 2
        text = one_line(text if len(text) <= _LENGTH else f"{text[:half]} … {text[-half:]}")
        name = f" {span.answer}: " if span.answer not in (None, answer) else ""
        parts.append(name + (f"[[{text}]]" if span.learnt else text))
        answer = span.answer
    parts += [" …"] if len(spans) > _SPANS else []
    return "".join(parts)


def _spans(codec: Codec, item: Features) -> list[TextSpan]:
    """Neighbouring tokens of one kind, decoded together; a picture in place of its tokens."""
    ids, pictures, spans = item["input_ids"], seen_in(item), list[TextSpan]()
    # bool: labels of stage rm are an array, and JSON has no numpy.bool.
    is_trained = [bool(label != IGNORE_INDEX) for label in item["labels"]]
    kinds = list(zip(is_trained, _responses(item), _pictures(codec, item), strict=True))
    shown_pictures = set[int]()
    for kind, positions in groupby(range(len(ids)), kinds.__getitem__):
        trained, response, picture = kind
        if picture is None:
            shown_ids = [i for t in positions for i in _shown_ids(ids[t], item["labels"][t])]
            spans.append(TextSpan(codec.tokenizer.decode(shown_ids), trained, response))
        elif picture not in shown_pictures:
            shown_pictures.add(picture)
            spans.append(_picture_span(codec, pictures[picture], response))
    return spans


def _responses(item: Features) -> list[str | None]:
    """For each token, the response of a pair that contains it."""
    lengths = item.get("lengths", (len(item["input_ids"]),))  # prompt, chosen, rejected
    names = (None, "chosen", "rejected") if len(lengths) > 2 else (None, None)
    return [name for name, length in zip(names, lengths, strict=False) for _ in range(length)]


def _pictures(codec: Codec, item: Features) -> list[int | None]:
    """For each token, the number of the picture that it is a placeholder of."""
    placeholders = frozenset() if codec.media is None else codec.media.processor.token_ids
    numbers = iter([n for n, seen in enumerate(seen_in(item)) for _ in range(seen.tokens)])
    return [next(numbers, None) if i in placeholders else None for i in item["input_ids"]]


def _shown_ids(token: int, label: int) -> tuple[int, ...]:
    """A token; before it its label, if that is another one: some templates end a response with a
    line break, where the label is the end token."""
    return (token,) if label in (token, IGNORE_INDEX) else (label, token)


def _picture_span(codec: Codec, seen: Seen, response: str | None) -> TextSpan:
    assert codec.media is not None
    size = f"{seen.width} x {seen.height}, {counted(seen.tokens, 'token')}"
    thumbnail = codec.media.files.thumbnail(seen)
    return TextSpan(f"[{seen.name}: {size}]", False, response, thumbnail)
