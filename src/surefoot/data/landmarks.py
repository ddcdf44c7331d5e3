"""Where a character of a text is among its tokens, without offsets, which cost a fifth of encoding.

A tokenizer cuts a text at its special tokens before anything else, and they come in the same order
in the text and in its ids: they are landmarks. From one of them on, a byte-level tokenizer loses
nothing, each id stands for the same bytes everywhere. So where the text from a landmark to a
character, encoded alone, gives just the ids that follow the landmark, these end at that character.
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
from tokenizers.pre_tokenizers import ByteLevel

from .example import JSON

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
        """How many tokens ``text[:position]`` has, if these are what it would have alone."""
        return self._from(bisect_left(self.landmarks, (position + 1,)), position)

    def end(self, position: int) -> int | None:
        """How many tokens begin before ``position``, if none lies across it."""
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
        """``normalizes``: the tokenizer brings text into NFC."""
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._ids, self._normalizes = tokens, normalizes

    def find(self, text: str, ids: list[int], encode: Encode) -> Known | None:
        """Those in a text; None where it is not certain which is which."""
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return None
        found: list[Landmark] = []
        index = -1
        for match in self._pattern.finditer(text):
            try:
                index = ids.index(self._ids[match[0]], index + 1)
            except ValueError:
                return None
            found.append((match.end(), match.start(), index))
        num_ids = sum(map(ids.count, {ids[index] for _, _, index in found}))
        return Known(text, ids, found, encode) if num_ids == len(found) else None


def landmarks_of(rust: Tokenizer, words: Collection[str]) -> Landmarks | None:
    """The special tokens among ``words``; None if the tokenizer may lose text."""
    parts = json.loads(rust.to_str())
    added = rust.get_added_tokens_decoder()
    is_lossless = (
        parts["normalizer"] in (None, {"type": "NFC"})
        and _is_byte_level(parts["pre_tokenizer"])
        and _knows_bytes(parts["model"])
        and not any(token.lstrip or token.rstrip for token in added.values())
    )
    plain = {t.content: i for i, t in added.items() if t.special and not t.normalized}
    tokens = {word: plain[word] for word in plain.keys() & words}
    return Landmarks(tokens, normalizes=bool(parts["normalizer"])) if is_lossless else None


def _is_byte_level(part: JSON | None) -> bool:
    """Whether a pre-tokenizer ends in bytes, and neither adds nor takes away anything."""
    steps = cast(list[JSON], part["pretokenizers"] if part and "pretokenizers" in part else [part])
    *before, last = ({} if step is None else step for step in steps)
    is_kept = all(
        step.get("type") == "Digits"
        or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in before
    )
    return is_kept and last.get("type") == "ByteLevel" and not last["add_prefix_space"]


def _knows_bytes(model: JSON) -> bool:
    """Whether a model spells any bytes, and always in the same way."""
    vocabulary = cast(JSON, model["vocab"])
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    is_plain = model["type"] == "BPE" and not any(model.get(name) for name in names)
    return is_plain and all(byte in vocabulary for byte in ByteLevel.alphabet())
