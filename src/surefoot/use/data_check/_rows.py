"""What is odd about a single row: the order of its turns, and the text of its response."""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...data.data_order import Index
from ...data.example import Example, Message

MEDIA = ("<image>", "<video>", "<audio>")
LOOP_LENGTH, LOOP_RATIO = 400, 0.08  # bytes of a response, and its compressed size at most
NO_END = "conversations that do not end with a response"
FIRST = "conversations that begin with a response"
TWICE = "conversations with two turns of one role in a row"
LATE = "system messages after the first turn"
ALONE = "results of functions without a call before"
PLACEHOLDER = "placeholders of pictures or sounds in the text"
CONTROL = "special tokens of the model in the text"
LOOP = "responses that repeat themselves"
ECHO = "responses equal to the prompt"


def texts_of(example: Example) -> RowTexts:
    """The texts of a row to compare with those of others."""
    if example.text is not None:
        return RowTexts(example.text, example.text, "", example.text)
    messages = example.messages
    response = response_of(example)
    before = messages if example.chosen or not _ends(messages) else messages[:-1]
    tools = json.dumps(example.tools, sort_keys=True, default=str) if example.tools else ""
    prompt = "\0".join([tools, *map(_written, before)])
    rejected = _written(example.rejected) if example.rejected else ""
    whole = f"{prompt}\1{_written(response) if response else ''}\1{rejected}\1{example.label}"
    said = [message.content for message in before if message.role != "system"]
    content = "\n".join([*said, response.content if response else ""])
    return RowTexts(whole, prompt, response.content if response else "", content)


def response_of(example: Example) -> Message | None:
    """The response of a row; of a pair, the chosen one."""
    if example.chosen is not None:
        return example.chosen
    return example.messages[-1] if _ends(example.messages) else None


def oddities(example: Example, specials: Sequence[str], *, needs_response: bool) -> Iterator[str]:
    """What is odd about a row. ``specials`` are the special tokens of the model."""
    messages = example.messages
    contents = [message.content for message in messages] if messages else [example.text or ""]
    if any(mark in content for content in contents for mark in MEDIA):
        yield PLACEHOLDER
    if any(mark in content for content in contents for mark in specials):
        yield CONTROL
    if example.text is not None:
        return
    if needs_response and example.chosen is None and not _ends(messages):
        yield NO_END
    yield from _order(messages)
    response = response_of(example)
    if response is None:
        return
    if is_loop(response.content):
        yield LOOP
    prompts = [message.content.strip() for message in messages if message.role == "user"]
    if response.content.strip() and prompts and prompts[-1] == response.content.strip():
        yield ECHO


def is_loop(text: str) -> bool:
    """Whether a text says the same again and again: it is long, and compresses to next to
    nothing."""
    data = text.encode(errors="replace")
    return len(data) >= LOOP_LENGTH and len(zlib.compress(data, 1)) < LOOP_RATIO * len(data)


def _order(messages: Sequence[Message]) -> Iterator[str]:
    roles = [message.role for message in messages]
    turns = [role for role in roles if role != "system"]
    if turns and turns[0] == "assistant":
        yield FIRST
    if "system" in roles[1:]:
        yield LATE
    if any(one == other and one != "tool" for one, other in pairwise(turns)):
        yield TWICE
    if any(
        message.role == "tool" and before.role not in ("assistant", "tool")
        for before, message in pairwise(messages)
    ):
        yield ALONE


def _ends(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].role == "assistant"


def _written(message: Message) -> str:
    pairs = [(call["name"], call["arguments"]) for call in message.tool_calls]  # ids may differ
    calls = json.dumps(pairs, sort_keys=True, default=str)
    return f"{message.role}:{message.content}{calls if message.tool_calls else ''}"


LENGTH = 8  # characters of a sequence
SHORTEST, LONGEST = 50, 20_000  # characters of a text that is compared, and that are looked at
NUMBERS, BANDS = 32, 8  # of a signature
SIMILAR = 0.8  # of the sequences are the same
SPACE = re.compile(r"\s+")
_RNG = np.random.RandomState(0)
_FACTORS = _RNG.randint(0, 2**62, NUMBERS).astype(np.uint64) * np.uint64(2) + np.uint64(1)
_POWERS = np.array([pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(LENGTH)], np.uint64)
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class RowTexts:
    """The texts of a row that are compared."""

    whole: str  # everything
    prompt: str  # everything before the response
    response: str
    content: str  # what the signature is of: no system message, which many rows share


class RowHashes:
    """Hashes of rows, which are added in order."""

    def __init__(self) -> None:
        self._whole, self._prompt, self._response = array("Q"), array("Q"), array("Q")
        self._file = tempfile.TemporaryFile(prefix="surefoot-minhash-")  # noqa: SIM115
        self._places = array("q")  # rows that have a signature

    def __len__(self) -> int:
        return len(self._whole)

    def __enter__(self) -> RowHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: RowTexts) -> None:
        """Add the next row."""
        content = SPACE.sub(" ", row.content).strip().casefold()
        if len(content) >= SHORTEST:
            self._places.append(len(self))
            self._file.write(signature(content).tobytes())
        self._whole.append(_hashed(row.whole))
        self._prompt.append(_hashed(row.prompt))
        self._response.append(_hashed(row.response))

    @property
    def whole(self) -> Hashes:
        """[rows] equal for rows that are the same."""
        return np.array(self._whole, np.uint64)

    @property
    def prompt(self) -> Hashes:
        """[rows] equal for rows with the same prompt."""
        return np.array(self._prompt, np.uint64)

    @property
    def response(self) -> Hashes:
        """[rows] equal for rows with the same response."""
        return np.array(self._response, np.uint64)

    def similar(self) -> tuple[Index, Index]:
        """Pairs of rows, the earlier one first, that are similar and not the same."""
        count = len(self._places)
        if not count:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        self._file.flush()
        kept = np.memmap(self._file, np.uint16, "r", shape=(count, NUMBERS))
        first, second = _pairs(kept)
        del kept
        places, whole = np.array(self._places, np.int64), self.whole
        first, second = places[first], places[second]
        differ = whole[first] != whole[second]
        return first[differ], second[differ]


def signature(text: str) -> NDArray[np.uint16]:
    """[32] the smallest hash of the sequences of ``text``, for each of 32 hash functions."""
    points = np.frombuffer(text[:LONGEST].encode("utf-32-le", "replace"), np.uint32)
    points = points.astype(np.uint64)
    count = max(1, len(points) - LENGTH + 1)
    points = np.pad(points, (0, max(0, LENGTH - len(points))))
    hashes = np.zeros(count, np.uint64)
    for place, power in enumerate(_POWERS):
        hashes += points[place : place + count] * power
    hashes = np.unique(hashes ^ (hashes >> np.uint64(31)))
    lowest = ((hashes[:, None] * _FACTORS) >> np.uint64(32)).min(axis=0)
    found: NDArray[np.uint16] = (lowest & np.uint64(0xFFFF)).astype(np.uint16)
    return found


def _pairs(signatures: NDArray[np.uint16]) -> tuple[Index, Index]:
    """Pairs of places with similar signatures, among neighbors in the order of a band."""
    count, found = len(signatures), np.empty(0, np.int64)
    width = NUMBERS // BANDS
    for band in range(BANDS):
        part = np.ascontiguousarray(signatures[:, band * width : (band + 1) * width])
        keys = part.view(np.uint64)[:, 0]
        order = np.argsort(keys, kind="stable")
        equal = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        one, other = order[equal], order[equal + 1]
        agreed = np.concatenate(
            [np.empty(0)]
            + [
                (signatures[one[at : at + 4096]] == signatures[other[at : at + 4096]]).mean(axis=1)
                for at in range(0, len(one), 4096)
            ]
        )
        near = agreed >= SIMILAR
        found = np.union1d(found, one[near] * count + other[near])
    return found // count, found % count


def repeats(hashes: Hashes) -> tuple[Index, Index]:
    """The places of hashes that occurred before, ascending, and where each occurred first."""
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    origin = first[which]
    again = np.flatnonzero(origin != np.arange(len(hashes)))
    return again, origin[again]


def _hashed(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))
