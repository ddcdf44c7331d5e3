"""Map character positions to token positions without tokenizer offsets, which would take a fifth of
the encoding time.

A tokenizer splits a text at its special tokens before anything else, and they occur in the same
order in the text and in its ids: they are landmarks. After a landmark, a byte-level tokenizer loses
nothing: an id stands for the same bytes everywhere, so a landmark's id occurs only where the text
contains it. If the text from a landmark to a character, encoded alone, gives exactly the ids that
follow the landmark, these ids end at that character.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ..example import JSON

Landmark = tuple[int, int, int]  # its end and its beginning in the text, its place in the ids
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Known:
    """A text, its ids and its landmarks."""

    text: str
    ids: list[int]
    landmarks: Sequence[Landmark]
    encode: Encode

    def index(self, position: int) -> int | None:
        """How many tokens ``text[:position]`` has, if its own encoding gives the same tokens."""
        return self._from(bisect_left(self.landmarks, (position + 1,)), position)

    def end(self, position: int) -> int | None:
        """How many tokens begin before ``position``, if no token crosses it."""
        before = bisect_left(self.landmarks, (position + 1,))
        if before < len(self.landmarks) and self.landmarks[before][1] == position:
            return self.landmarks[before][2]
        return self._from(before, position)

    def _from(self, before: int, position: int) -> int | None:
        _, start, index = self.landmarks[before - 1] if before else (0, 0, 0)
        ids = self.encode(self.text[start:position])
        end = index + len(ids)
        return end if self.ids[index:end] == ids else None


class Landmarks:
    """Some special tokens of a byte-level tokenizer."""

    def __init__(self, tokens: Mapping[str, int], *, normalizes: bool) -> None:
        """``normalizes``: whether the tokenizer normalizes text to NFC."""
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._ids, self._normalizes = tokens, normalizes

    def find(self, text: str, ids: list[int], encode: Encode) -> Known | None:
        """Landmarks of a text; None if their assignment to ids is not certain."""
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return None
        found: list[Landmark] = []
        index = -1
        try:
            for match in self._pattern.finditer(text):
                index = ids.index(self._ids[match[0]], index + 1)
                found.append((match.end(), match.start(), index))
        except ValueError:  # a longer token is there instead
            return None
        return Known(text, ids, found, encode)


def token_aligner(rust: Tokenizer, words: Collection[str]) -> Landmarks | None:
    """The special tokens among ``words``; None if the tokenizer may lose text."""
    added = rust.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip for token in added.values()) or not _knows_bytes(rust):
        return None
    frame = Tokenizer(BPE())  # without the vocabulary, which may be large
    if rust.normalizer:
        frame.normalizer = rust.normalizer
    if rust.pre_tokenizer:
        frame.pre_tokenizer = rust.pre_tokenizer
    parts = json.loads(frame.to_str())
    if parts["normalizer"] not in (None, {"type": "NFC"}):
        return None
    plain = {t.content: i for i, t in added.items() if t.special and not t.normalized}
    tokens = {word: plain[word] for word in plain.keys() & words}
    is_kept = _is_byte_level(parts["pre_tokenizer"])
    return Landmarks(tokens, normalizes=bool(parts["normalizer"])) if is_kept else None


def _is_byte_level(part: JSON | None) -> bool:
    """Whether a pre-tokenizer ends in bytes, and neither adds nor removes anything."""
    steps = cast(list[JSON], part["pretokenizers"] if part and "pretokenizers" in part else [part])
    *before, last = ({} if step is None else step for step in steps)
    is_kept = all(
        step.get("type") == "Digits"
        or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in before
    )
    return is_kept and last.get("type") == "ByteLevel" and not last["add_prefix_space"]


def _knows_bytes(rust: Tokenizer) -> bool:
    """Whether the model can encode any bytes, always in the same way."""
    model = rust.model
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    is_plain = isinstance(model, BPE) and not any(getattr(model, name) for name in names)
    return is_plain and all(model.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
