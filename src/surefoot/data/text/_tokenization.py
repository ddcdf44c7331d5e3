"""Text to ids in batches through the Rust tokenizer; a message never produces a control token.

``<|im_end|>`` in a user's text is ordinary characters, not the end of the turn. If a message
contains one of the tokens that delimit turns, the token is wrapped in private-use marks before
rendering, and encoded as plain text: what transformers does with ``sanitize_control_tokens``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar, cast

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from ...errors import TemplateError

OPEN, CLOSE = "\U000f0000", "\U000f0001"  # as transformers has them; no message keeps its own
GUARDS = ("\n", ":", "x")  # a text is encoded behind the first of these that it does not join

Bounds = tuple[int, int]  # the first, and one past the last
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Rendered text. ``marked``: it contains marks around words that must stay plain text."""

    text: str
    marked: bool = False

    def __getitem__(self, part: slice) -> RenderedText:
        return RenderedText(self.text[part], self.marked)


class LazyOffsets:
    """For each token, the characters it covers, fetched one by one: few are needed, and a list of
    all takes a tenth of the time of encoding."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, index: int, /) -> Bounds:
        return cast(Bounds, self._encoding.token_to_chars(index))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and their positions in the text."""

    ids: list[int]
    offsets: LazyOffsets | list[Bounds]

    def index(self, position: int) -> int | None:
        """Number of tokens before a character; None if a token crosses its beginning."""
        before = bisect_left(self.offsets, (position, -1))
        if before and self.offsets[before - 1][1] > position:
            return None
        return before


class Tokenization:
    """A tokenizer that protects control tokens and aligns tokens with positions in the text.

    It uses its own copy of the Rust tokenizer, without a post-processor, because post-processors
    trim offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: Collection[str]) -> None:
        self._rust = Tokenizer.from_str(canonical(tokenizer))
        self._rust.post_processor = None
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(i for i, token in added.items() if token.special)
        known = tokenizer.added_tokens_encoder.keys() & control
        longest_first = sorted(known, key=len, reverse=True)
        words = "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!) never matches
        self._control = re.compile(words)
        self._marks = re.compile(f"{OPEN}({words}){CLOSE}|[{OPEN}{CLOSE}]")
        self._control_ids = frozenset(tokenizer.convert_tokens_to_ids(longest_first))
        self._ids_of = lru_cache(maxsize=1000)(self._encode_plain)  # such as the header of a turn

    def spells_control(self, value: object) -> bool:
        """Whether ``value``, a string or lists and dicts of strings, contains a control token."""
        return self._control.search("\0".join(_strings(value))) is not None  # no token has a \0

    def protect(self, value: T) -> T:
        """``value`` with marks around the control tokens that its strings contain."""
        return _map_strings(value, self._protect)

    def encode(self, texts: Sequence[RenderedText]) -> list[Tokens]:
        """Ids and offsets of every text; nothing is added before or after."""
        plain = [text.text for text in texts if not text.marked]
        encodings = self._rust.encode_batch(plain, add_special_tokens=False)
        encoded = (Tokens(each.ids, LazyOffsets(each)) for each in encodings)
        return [self._encode_marked(t.text) if t.marked else next(encoded) for t in texts]

    def encode_after(self, text: RenderedText) -> list[int]:
        """Ids of a text that continues another: without the space some tokenizers put first."""
        if text.marked:
            return [
                i for part, plain in self._parts(text.text) for i in self._after(part, plain).ids
            ]
        return self._after(text.text, False).ids

    def bounds(
        self,
        tokens: Tokens,
        text: RenderedText,
        spans: Sequence[Bounds],
        *,
        behind_prompt: bool = False,
    ) -> list[Bounds | None]:
        """The tokens of each span of a text: the first, and one past the last.

        None if a token crosses a bound or there is none. With ``behind_prompt``, also None if the
        text before the span, encoded alone, gives other ids than those before it.
        """

        def bounds_of(start: int, end: int) -> Bounds | None:
            if behind_prompt and not self.is_prefix(tokens, text, start):
                return None
            first, last = tokens.index(start), tokens.index(end)
            return None if first is None or last is None or first >= last else (first, last)

        return [bounds_of(start, end) for start, end in spans]

    def is_prefix(self, tokens: Tokens, text: RenderedText, end: int) -> bool:
        """Whether ``text[:end]``, encoded alone, gives exactly the first of ``tokens``, of
        ``text``.

        Special tokens split a text before anything else, so only what follows the last one counts.
        """
        count = tokens.index(end)
        if not count:
            return count == 0
        first = next((i for i in reversed(range(count)) if tokens.ids[i] in self._special), 0)
        tail = text[tokens.offsets[first][0] if first else 0 : end]
        ids = self.encode([tail])[0].ids if tail.marked else self._ids_of(tail.text)
        return ids == tokens.ids[first:count]

    def _encode_plain(self, text: str) -> list[int]:
        return self._rust.encode(text, add_special_tokens=False).ids

    def _protect(self, text: str) -> str:
        return self._control.sub(f"{OPEN}\\g<0>{CLOSE}", text.replace(OPEN, "").replace(CLOSE, ""))

    def _encode_marked(self, text: str) -> Tokens:
        ids: list[int] = []
        offsets: list[Bounds] = []
        position = 0
        for part, plain in self._parts(text):
            start = text.index(part, position)
            found = self._after(part, plain) if start else self._encode_part(part, plain)
            ids += found.ids
            spans = (found.offsets[i] for i in range(len(found.ids)))
            offsets += [(a + start, b + start) for a, b in spans]
            position = start + len(part)
        return Tokens(ids, offsets)

    def _parts(self, marked: str) -> Iterator[tuple[str, bool]]:
        """The parts of a marked text that are not empty, and whether each is to stay plain."""
        for i, part in enumerate(self._marks.split(marked)):
            if part:
                yield part, i % 2 == 1

    def _after(self, text: str, plain: bool) -> Tokens:
        """Encode after a letter, whose tokens are then removed: no space is added in front."""
        rust = self._without_tokens if plain else self._rust
        for guard in GUARDS:
            alone = rust.encode(guard, add_special_tokens=False).ids
            found = rust.encode(guard + text, add_special_tokens=False)
            if found.ids[: len(alone)] == alone:
                return self._checked(text, plain, found, len(alone))
        return self._encode_part(text, plain)

    def _encode_part(self, text: str, plain: bool) -> Tokens:
        rust = self._without_tokens if plain else self._rust
        return self._checked(text, plain, rust.encode(text, add_special_tokens=False), 0)

    def _checked(self, text: str, plain: bool, found: Encoding, skip: int) -> Tokens:
        """The ids after the ``skip`` tokens of one letter; no control token if ``plain``."""
        ids = found.ids[skip:]
        if plain and self._control_ids.intersection(ids):
            raise TemplateError(f"this tokenizer cannot encode {text!r} as plain text")
        before = 1 if skip else 0
        return Tokens(ids, [(max(a - before, 0), b - before) for a, b in found.offsets[skip:]])

    @cached_property
    def _without_tokens(self) -> Tokenizer:
        """The same tokenizer without its added tokens, which treats everything as plain text."""
        parts = json.loads(self._rust.to_str())
        return Tokenizer.from_str(json.dumps({**parts, "added_tokens": []}))


def canonical(tokenizer: PreTrainedTokenizerBase) -> str:
    """The Rust tokenizer as JSON, without padding that an earlier call may have set."""
    rust = tokenizer.backend_tokenizer
    if rust.padding or rust.truncation:
        rust = Tokenizer.from_str(rust.to_str())
        rust.no_padding()
        rust.no_truncation()
    return str(rust.to_str())


def _strings(value: object) -> list[str]:
    """All strings in a value but keys."""
    found: list[str] = []
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, list | tuple):
            rest += each
    return found


def _map_strings(value: T, change: Callable[[str], str]) -> T:
    if isinstance(value, str):
        return cast(T, change(value))
    if isinstance(value, dict):
        return cast(T, {key: _map_strings(item, change) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return cast(T, [_map_strings(item, change) for item in value])
    return value
