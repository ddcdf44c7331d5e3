"""Text to ids in batches through the Rust tokenizer; a message never produces a control token.

``<|im_end|>`` in a user's text is ordinary characters, not the end of the turn. If a message
contains one of the tokens that delimit turns, the token is wrapped in private-use marks before
rendering, and encoded as plain text: what transformers does with ``sanitize_control_tokens``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar, cast

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from ...errors import TemplateError
from ..example import JSON

OPEN, CLOSE = "\U000f0000", "\U000f0001"  # as transformers has them; no message keeps its own
GUARDS = ("\n", ":", "x")  # a text is encoded behind the first of these that it does not join

Bounds = tuple[int, int]  # the first, and one past the last
T = TypeVar("T")
Landmark = tuple[int, int, int]  # its end and its beginning in the text, its place in the ids
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Rendered text. ``marked``: it contains marks around words that must stay plain text."""

    text: str
    marked: bool = False

    def __getitem__(self, part: slice) -> RenderedText:
        return RenderedText(self.text[part], self.marked)


# Characters that NFC neither changes nor joins to the one before, in any version of Unicode: Latin,
# Greek and Cyrillic letters, punctuation, symbols, Chinese, Japanese, Korean, emoji.
_INERT = re.compile(
    "[\0-\u02ff\u0388-\u0482\u048a-\u052f\u1e00-\u1eff\u2002-\u20cf\u2190-\u2328\u232b-\u2adb"
    "\u3000-\u3029\u3030-\u3098\u309b-\u9fff\uac00-\ud7a3\ufe0f\uff00-\uffef\U0001f000-\U0001faff]*"
)


class LazyOffsets:
    """For each token, the characters it covers, fetched one by one from an encoding."""

    def __init__(self, encode: Callable[[], Encoding]) -> None:
        self._encode = encode

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, index: int, /) -> Bounds:
        return cast(Bounds, self._encoding.token_to_chars(index))

    @cached_property
    def _encoding(self) -> Encoding:
        return self._encode()


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

    def overlapping(self, start: int, end: int) -> Bounds | None:
        """The tokens that have one of the characters from ``start`` to ``end``; None without."""
        first = bisect_left(self.offsets, (start, -1))
        while first and self.offsets[first - 1][1] > start:
            first -= 1
        last = bisect_left(self.offsets, (end, -1))
        return (first, last) if first < last and start < end else None


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
        control_tokens = tokenizer.added_tokens_encoder.keys() & control
        longest_first = sorted(control_tokens, key=len, reverse=True)
        words = "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!) never matches
        self._control = re.compile(words)
        self._marks = re.compile(f"{OPEN}({words}){CLOSE}|[{OPEN}{CLOSE}]")
        self._control_ids = frozenset(tokenizer.convert_tokens_to_ids(longest_first))
        self._landmarks = token_aligner(self._rust, control_tokens)
        self._unnormalized = _without_nfc(self._rust) if self._landmarks else None
        self._short: dict[str, list[int]] = {}

    def spells_control(self, value: object) -> bool:
        """Whether ``value``, a string or lists and dicts of strings, contains a control token."""
        return self._control.search("\0".join(_strings(value))) is not None  # no token has a \0

    def protect(self, value: T) -> T:
        """``value`` with marks around the control tokens that its strings contain."""
        return _map_strings(value, self._protect)

    def encode(self, texts: Sequence[RenderedText]) -> list[Tokens]:
        """Ids and offsets of every text; nothing is added before or after."""
        encoded = self._encode_plain([text.text for text in texts if not text.marked])
        return [self._encode_marked(t.text) if t.marked else next(encoded) for t in texts]

    def encode_after(self, text: RenderedText) -> list[int]:
        """Ids of a text that continues another: without the space some tokenizers put first."""
        parts = self._parts(text.text) if text.marked else [(text.text, False)]
        return [i for part, plain in parts for i in self._after(part, plain).ids]

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
        aligned = None
        if self._landmarks and not text.marked:
            aligned = self._landmarks.find(text.text, tokens.ids, self._ids)
        return [self._bounds(tokens, text, aligned, span, behind_prompt) for span in spans]

    def is_prefix(self, tokens: Tokens, text: RenderedText, end: int) -> bool:
        """Whether ``text[:end]``, encoded alone, gives exactly the first of ``tokens``, of
        ``text``.

        Special tokens split a text before anything else, so only what follows the last one counts.
        """
        count = tokens.index(end)
        if not count:
            return count == 0
        first = count
        while first > 0:
            first -= 1
            if tokens.ids[first] in self._special:
                break
        tail = text[tokens.offsets[first][0] if first else 0 : end]
        ids = self.encode([tail])[0].ids if tail.marked else self._ids(tail.text)
        return ids == tokens.ids[first:count]

    def _encode_plain(self, texts: list[str]) -> Iterator[Tokens]:
        """With landmarks, offsets are computed only when they are needed, which is rare."""
        if self._landmarks is None:
            encoded = self._rust.encode_batch(texts, add_special_tokens=False)
            return (Tokens(each.ids, LazyOffsets(partial(_same, each))) for each in encoded)
        encode = partial(self._rust.encode, add_special_tokens=False)
        pairs = zip(self._encode_fast(texts), texts, strict=True)
        return (Tokens(each.ids, LazyOffsets(partial(encode, text))) for each, text in pairs)

    def _encode_fast(self, texts: Sequence[str]) -> Iterator[Encoding]:
        """Without offsets, and without NFC where it would change nothing: it takes a tenth of the
        time."""
        if self._unnormalized is None:
            return iter(self._rust.encode_batch_fast(texts, add_special_tokens=False))
        is_inert = [text.isascii() or _INERT.fullmatch(text) is not None for text in texts]
        encoded = {}
        for rust, which in ((self._unnormalized, True), (self._rust, False)):
            part = [text for text, each in zip(texts, is_inert, strict=True) if each is which]
            encoded[which] = iter(rust.encode_batch_fast(part, add_special_tokens=False))
        return (next(encoded[which]) for which in is_inert)

    def _bounds(
        self,
        tokens: Tokens,
        text: RenderedText,
        aligned: AlignedText | None,
        span: Bounds,
        behind_prompt: bool,
    ) -> Bounds | None:
        start, end = span
        first = aligned.index(start) if aligned else None
        last = aligned.end(end) if aligned else None
        if first is None and behind_prompt and not self.is_prefix(tokens, text, start):
            return None
        first = tokens.index(start) if first is None else first
        last = tokens.index(end) if last is None else last
        return None if first is None or last is None or first >= last else (first, last)

    def _ids(self, text: str) -> list[int]:
        """Ids of an unmarked text; short ones, such as the headers of turns, are cached."""
        if len(text) > 64:
            return self.encode([RenderedText(text)])[0].ids
        if text not in self._short:
            if len(self._short) > 10_000:
                self._short.clear()
            self._short[text] = self.encode([RenderedText(text)])[0].ids
        return self._short[text]

    def _protect(self, text: str) -> str:
        return self._control.sub(f"{OPEN}\\g<0>{CLOSE}", text.replace(OPEN, "").replace(CLOSE, ""))

    def _encode_marked(self, text: str) -> Tokens:
        ids: list[int] = []
        offsets: list[Bounds] = []
        position = 0
        for part, plain in self._parts(text):
            start = text.index(part, position)
            tokens = self._after(part, plain) if start else self._encode_part(part, plain)
            ids += tokens.ids
            every = (tokens.offsets[i] for i in range(len(tokens.ids)))
            offsets += [(a + start, b + start) for a, b in every]
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
            encoding = rust.encode(guard + text, add_special_tokens=False)
            if encoding.ids[: len(alone)] == alone:
                return self._checked(text, plain, encoding, len(alone))
        return self._encode_part(text, plain)

    def _encode_part(self, text: str, plain: bool) -> Tokens:
        rust = self._without_tokens if plain else self._rust
        return self._checked(text, plain, rust.encode(text, add_special_tokens=False), 0)

    def _checked(self, text: str, plain: bool, encoding: Encoding, skip: int) -> Tokens:
        """The ids after the ``skip`` tokens of one letter; no control token if ``plain``."""
        ids = encoding.ids[skip:]
        if plain and self._control_ids.intersection(ids):
            raise TemplateError(f"this tokenizer cannot encode {text!r} as plain text")
        before = 1 if skip else 0
        return Tokens(ids, [(max(a - before, 0), b - before) for a, b in encoding.offsets[skip:]])

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


def _same(encoding: Encoding) -> Encoding:
    return encoding


def _strings(value: object) -> list[str]:
    """All strings in a value but keys."""
    strings: list[str] = []
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            strings.append(each)
        elif isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, list | tuple):
            rest += each
    return strings


def _map_strings(value: T, change: Callable[[str], str]) -> T:
    if isinstance(value, str):
        return cast(T, change(value))
    if isinstance(value, dict):
        return cast(T, {key: _map_strings(item, change) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return cast(T, [_map_strings(item, change) for item in value])
    return value


@dataclass(frozen=True, slots=True)
class AlignedText:
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
    """Some special tokens of a byte-level tokenizer, which map characters to tokens without its
    offsets; these would take a fifth of the encoding time.

    A tokenizer splits a text at its special tokens before anything else, and they occur in the same
    order in the text and in its ids: they are landmarks. After a landmark, a byte-level tokenizer
    loses nothing: an id stands for the same bytes everywhere, so a landmark's id occurs only where
    the text contains it. If the text from a landmark to a character, encoded alone, gives exactly
    the ids that follow the landmark, these ids end at that character.
    """

    def __init__(self, tokens: Mapping[str, int], *, normalizes: bool) -> None:
        """``normalizes``: whether the tokenizer normalizes text to NFC."""
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._ids, self._normalizes = tokens, normalizes

    def find(self, text: str, ids: list[int], encode: Encode) -> AlignedText | None:
        """Landmarks of a text; None if their assignment to ids is not certain."""
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return None
        landmarks: list[Landmark] = []
        index = -1
        try:
            for match in self._pattern.finditer(text):
                index = ids.index(self._ids[match[0]], index + 1)
                landmarks.append((match.end(), match.start(), index))
        except ValueError:  # a longer token is there instead
            return None
        return AlignedText(text, ids, landmarks, encode)


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


def _without_nfc(rust: Tokenizer) -> Tokenizer | None:
    """The same tokenizer, and model, without its normalizer; None if it has none, or if one of its
    added tokens would have another id."""
    added = dict(sorted(rust.get_added_tokens_decoder().items()))
    if rust.normalizer is None or not all(_INERT.fullmatch(t.content) for t in added.values()):
        return None
    plain = Tokenizer(rust.model)
    plain.pre_tokenizer = rust.pre_tokenizer
    plain.add_tokens(list(added.values()))
    return plain if plain.get_added_tokens_decoder() == added else None


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
