"""The end of a form: the tokens by which a response that must be JSON ends from where it is.

A grammar allows all tokens that can follow, and so it ends nothing: a model may write digits, or
open brackets, until it has no tokens left. The way to the end is found with the grammar itself. Of
what it allows, the token is taken that closes most, or else the shortest value, or else the
spelling of a name that the schema requires. It is not always the shortest way, but it is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # an extra, and here only a name
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 1024  # tokens of an ending that is looked for
_LONGEST_WORD = 1000  # bytes of a string that are compared with words of the schema
# Digits of each part of a number. An exponent of three could be more than a float64 has.
DIGITS = {"": 19, ".": 17, "e": 2}
_CLOSING = rb"[]}]+"
_OUTSIDE = (  # of strings, the best first
    _CLOSING,
    rb": ?",
    rb',"|, ?"?',  # before digits, of which a number may have more
    rb"[0-9]",
    rb'(""|\[\]|\{\}|null|true|false)[]}]*',
    rb'"|: ?"',
    rb"\[",
    rb"\{",
    rb"[a-z]+|[0-9]+",
)
_INSIDE = (rb'"[]}]*|": ?', rb"[!-/:-@^-`|~]+", rb"[0-9]+", rb"[a-zA-Z]+", rb"[ -~]+")


@dataclass(frozen=True)
class JsonText:
    """Where a text of JSON has come to."""

    string: bytes | None = None  # what the string has so far; None: outside of strings
    is_escaped: bool = False
    part: str = ""  # of a number: what is before the point, behind it, or the exponent
    digits: int = 0  # of this part

    def after(self, piece: bytes) -> JsonText:
        """Where it is with another piece."""
        text = self
        for byte in piece:
            text = text._after(bytes([byte]))
        return text

    def _after(self, letter: bytes) -> JsonText:
        if self.string is not None:
            if letter == b'"' and not self.is_escaped:
                return JsonText()
            is_long = len(self.string) > _LONGEST_WORD
            string = self.string if is_long else self.string + letter
            return JsonText(string, letter == b"\\" and not self.is_escaped)
        if letter == b'"':
            return JsonText(b"")
        if letter.isdigit():
            return replace(self, digits=self.digits + 1)
        if self.digits and letter in b".eE":
            return JsonText(part="." if letter == b"." else "e")
        return self if self.part == "e" and letter in b"+-" else JsonText()


@dataclass(frozen=True, eq=False)
class TokenPieces:
    """The bytes of all V tokens, and which of them come first on the way to an end."""

    tokenizer: LLTokenizer

    @cached_property
    def all(self) -> list[bytes]:
        """By id."""
        ids = range(self.tokenizer.vocab_size)
        return [bytes(self.tokenizer.decode_bytes([number])) for number in ids]

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The ids, by the bytes."""
        return {piece: number for number, piece in enumerate(self.all)}

    @cached_property
    def num_digits(self) -> np.ndarray:
        """[V] digits with which each token begins."""
        return np.array([len(piece) - len(piece.lstrip(b"0123456789")) for piece in self.all])

    @cached_property
    def outside(self) -> np.ndarray:
        """[V] the rank of each token outside of strings."""
        return self._ranks(_OUTSIDE)

    @cached_property
    def inside(self) -> np.ndarray:
        """[V] the rank of each token in a string. What it must have in it is often not a letter,
        and long tokens fill more."""
        return self._ranks(_INSIDE)

    def spelling(self, text: bytes) -> list[int]:
        """Tokens of a text, each as long as it can be; none if it cannot be written."""
        numbers = list[int]()
        while text:
            starts = (text[:end] for end in range(len(text), 0, -1))
            start = next((start for start in starts if start in self.ids), b"")
            if not start:
                return []
            numbers.append(self.ids[start])
            text = text[len(start) :]
        return numbers

    def _ranks(self, forms: Sequence[bytes]) -> np.ndarray:
        compiled = [re.compile(form) for form in forms]

        def rank(piece: bytes) -> float:
            matching = (place for place, form in enumerate(compiled) if form.fullmatch(piece))
            return next(matching, len(compiled)) + 1 - min(len(piece), 99) / 100

        return np.array([rank(piece) for piece in self.all])


@dataclass(frozen=True, eq=False)
class Endings:
    """Finds the tokens that end a text of one schema."""

    pieces: TokenPieces
    words: Sequence[bytes]  # what strings may have to be, with the quote behind it

    @classmethod
    def of(cls, pieces: TokenPieces, schema: object) -> Endings:
        """Of a JSON schema: names that are required come first, then values, the short ones
        before the others."""
        names, values, parts = set[str](), set[str](), [schema]
        while parts:
            part = parts.pop()
            if isinstance(part, list):
                parts += part
            elif isinstance(part, dict):
                parts += part.values()
                names |= _texts(part.get("required"))
                values |= _texts(part.get("enum")) | _texts([part.get("const")])
        words = [*sorted(names, key=len), *sorted(values - names, key=len)]
        return cls(pieces, [json.dumps(word, ensure_ascii=False)[1:].encode() for word in words])

    def find(self, matcher: LLMatcher, text: JsonText, limit: int) -> list[int] | None:
        """The tokens from where ``matcher`` is, with that of the end; None: no way of ``limit``
        tokens is found."""
        matcher, ids = matcher.deep_copy(), list[int]()
        costs_V = np.zeros(len(self.pieces.all))  # of tokens that were used before
        while len(ids) < limit:
            if matcher.is_accepting():
                return [*ids, self.pieces.tokenizer.eos_token]
            following = list(matcher.compute_ff_tokens())  # as no other can
            following = following or self._next(matcher, text, costs_V)
            if not following:
                return None
            for number in following:
                if not matcher.consume_token(number):
                    return None
                is_filling = text.string is not None and self.pieces.inside[number] >= 1
                if is_filling or self.pieces.num_digits[number]:
                    costs_V[number] += 100  # or a pattern could have it for ever
                text = text.after(self.pieces.all[number])
                ids.append(number)
        return None

    def _next(self, matcher: LLMatcher, text: JsonText, costs_V: np.ndarray) -> list[int]:
        """The tokens that lead to the end; none if nothing may follow."""
        numbers = np.flatnonzero(allowed_by(matcher)[: len(costs_V)])
        if not len(numbers):
            return []
        ranks_V = self.pieces.outside if text.string is None else self.pieces.inside
        best = int(numbers[(ranks_V[numbers] + costs_V[numbers]).argmin()])
        if text.string is not None and ranks_V[best] >= 1:  # which does not end the string
            for word in self.words:
                if word.startswith(text.string):
                    ids = self.pieces.spelling(word[len(text.string) :])
                    if ids and matcher.validate_tokens(ids) == len(ids):
                        return ids
        return [best]


def _texts(values: object) -> set[str]:
    items = values if isinstance(values, list) else []
    return {value for value in items if isinstance(value, str)}


def allowed_by(matcher: LLMatcher) -> np.ndarray:
    """[V] whether each token may follow; V may be rounded up."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little").astype(bool)


def ends(matcher: LLMatcher, ids: Sequence[int]) -> bool:
    """Whether these tokens, of which the last one is that of the end, end the text."""
    trial = matcher.deep_copy()
    return bool(trial.consume_tokens(list(ids[:-1])) and trial.is_accepting())
