"""Rendered examples with their labels, and how long they are."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...batch import IGNORE_INDEX, Features
from ...data.example import Dropped, Encoded, Example, Truncated, items_of
from ...data.text.codec import Codec
from ...errors import counted

ANSWERS = (None, "chosen", "rejected")  # what the lengths of a pair are of


@dataclass(frozen=True)
class TextSpan:
    """A span of text that is trained or masked; for a pair, also the response that contains it."""

    text: str
    learnt: bool
    answer: str | None = None  # chosen or rejected


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
    codec: Codec, example: Example, outcome: Encoded, whole: Encoded
) -> PreviewExample:
    """An example as it is trained on; ``whole`` is its outcome without a limit of length."""
    return PreviewExample(
        origin=example.origin,
        tokens=sum(num_tokens_of(item) for item in items_of(whole)),
        cut=isinstance(outcome, Truncated),
        dropped=outcome.reason if isinstance(outcome, Dropped) else None,
        items=[_sequence(codec, item) for item in items_of(outcome)],
    )


def _pairs(item: Features) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Ids and labels; in some stages an item has several, such as chosen and rejected."""
    for name, ids in item.items():
        if name.endswith("input_ids"):
            yield ids, item[name.removesuffix("input_ids") + "labels"]


def num_tokens_of(item: Features) -> int:
    """The tokens of an item, of both responses of a pair."""
    return sum(len(ids) for ids, _ in _pairs(item))


def num_limited(item: Features) -> int:
    """The tokens that ``cutoff_len`` limits: of a pair, the prompt with its longer response."""
    if "lengths" not in item:
        return num_tokens_of(item)
    prompt, *answers = (int(length) for length in item["lengths"])
    return prompt + max(answers)


def num_trained_of(item: Features) -> int:
    """Its trained tokens; nothing predicts the first one of a sequence."""
    return sum(label != IGNORE_INDEX for _, labels in _pairs(item) for label in labels[1:])


def _sequence(codec: Codec, item: Features) -> RenderedExample:
    parts: list[TextSpan] = []
    trained = 0
    for ids, labels in _pairs(item):
        is_trained = [label != IGNORE_INDEX for label in labels]
        trained += sum(is_trained[1:])  # nothing predicts the first token
        answers = _answers(item, len(ids))
        kinds = list(zip(is_trained, answers, strict=True))
        bounds = [0, *(i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1]), len(ids)]
        for start, end in pairwise(bounds):
            text = codec.tokenizer.decode(_trained(ids[start:end], labels[start:end]))
            parts.append(TextSpan(text, is_trained[start], answers[start]))
    return RenderedExample(parts, num_tokens_of(item), trained)


def _trained(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The tokens to show: where another one than the next is trained, that one in front."""
    pairs = zip(ids, labels, strict=True)
    return [
        token
        for i, label in pairs
        for token in ((i,) if label in (i, IGNORE_INDEX) else (label, i))
    ]


def _answers(item: Features, count: int) -> list[str | None]:
    """For each token, the response of a pair that contains it."""
    lengths = item.get("lengths", (count,))
    return [name for name, length in zip(ANSWERS, lengths, strict=False) for _ in range(length)]


BINS = 8  # up to cutoff_len
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class LengthBin:
    """The sequences with more than ``above`` tokens, and at most ``most``."""

    above: int
    most: int
    count: int


def length_bins(lengths: Mapping[int, int], cutoff_len: int) -> list[LengthBin]:
    """Bins of equal width up to ``cutoff_len``, doubled from there on, the last up to the
    longest."""
    if not lengths:
        return []
    edges = _edges(max(lengths), cutoff_len)
    counts: Counter[int] = Counter()
    for length, count in lengths.items():
        counts[bisect_left(edges, length)] += count
    return [
        LengthBin(above, most, counts[number])
        for number, (above, most) in enumerate(pairwise([0, *edges]))
    ]


def quantiles(lengths: Counter[int]) -> Mapping[float, int]:
    """Tokens that each of ``QUANTILES``, shares of all sequences, does not exceed."""
    total, seen, length_at_share = lengths.total(), 0, dict[float, int]()
    for length in sorted(lengths):
        seen += lengths[length]
        for share in QUANTILES:
            if share not in length_at_share and seen >= share * total:
                length_at_share[share] = length
    return length_at_share


def _edges(longest: int, cutoff_len: int) -> list[int]:
    """The upper bounds: one at ``cutoff_len``, the last at ``longest``."""
    top = min(longest, cutoff_len)
    steps = {top * i // BINS for i in range(1, BINS + BINS // 2)}
    steps |= {top << power for power in range(1, (longest // top).bit_length())} if top else set()
    return sorted({step for step in steps if 0 < step < longest} | {longest})
