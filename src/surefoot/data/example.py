"""The common form of every dataset format: the messages of one conversation, in the usual roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..batch import Features
from ..errors import counted

Role = Literal["system", "user", "assistant", "tool"]
JSON = Mapping[str, object]
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, in data and templates
Dicts = Sequence[Mapping[str, object]]  # messages or tools, as chat templates take them
Spans = list[tuple[int, int]]  # first and one past the last character
MEDIUM = "\U000f0002"  # in the content of a message: a picture stands here
MEDIA_COLUMN = "media"  # of encoded items: the pictures of each, as JSON


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``learn`` True trains on it, False masks it, None follows the recipe."""

    role: Role
    content: str
    tool_calls: tuple[JSON, ...] = ()  # [{"name", "arguments", maybe "id"}] of an assistant turn
    learn: bool | None = None
    reasoning: str = ""  # the thought before an assistant's answer
    # its other keys, for templates that read them
    fields: JSON = field(default_factory=dict, hash=False)
    media: tuple[str | bytes | None, ...] = ()  # of its content: path or file; None: in a column

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing, without being marked to be trained on."""
        return not (self.content.strip() or self.tool_calls) and self.learn is not True


def sources_of(messages: Iterable[Message]) -> list[str | bytes]:
    """The pictures of a conversation, in the order of their placeholders."""
    return [source for message in messages for source in message.media if source]


@dataclass(frozen=True, slots=True)
class Example:
    """One parsed row. ``messages`` end in the response; a ranking row has its two responses apart.

    ``text`` is set instead for a plain text (``stage: pt``), ``token_ids`` for a row that has
    already been encoded.
    """

    messages: tuple[Message, ...] = ()
    # functions the model may call: [{"name", "description", "parameters"}]
    tools: tuple[JSON, ...] = ()
    text: str | None = None
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None  # and the label of each
    chosen: Message | None = None  # ranking: the better answer
    rejected: Message | None = None  # ranking: the worse one
    label: bool | None = None  # kto: whether the last answer is desirable
    unread_mark: str | None = None  # a column that seems to say that, but that nothing reads
    unread: tuple[str, ...] = ()  # keys of it, and of objects in it, that nothing reads
    template_arguments: JSON = field(default_factory=dict)  # of this row, beside the recipe's
    notes: tuple[str, ...] = ()  # what the reader of the report should know of the row
    columns: JSON = field(default_factory=dict)  # the row itself, for rewards
    origin: str = ""  # "dataset:row", for messages to people


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that cannot be read: skipped, counted and reported."""

    index: int  # of the row in its dataset, from 0
    reason: str
    is_dropped: bool = False  # it is as it should be, and has nothing to learn: a null, a flag


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example without trained tokens; counted and reported, never trained.

    Equal reasons are counted together, so a reason contains no row and no length.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Truncated:
    """Features of an example that was truncated to ``cutoff_len``; counted and reported."""

    features: Sequence[Features]


Encoded = Sequence[Features] | Truncated | Dropped  # a long text may give several items


def items_of(outcome: Encoded) -> Sequence[Features]:
    """The features of an example; none if it is dropped."""
    if isinstance(outcome, Dropped):
        return ()
    return outcome.features if isinstance(outcome, Truncated) else outcome


def unread_in(
    rows: Iterable[Example | BrokenRow], items: Iterable[Features]
) -> dict[str, tuple[int, int]]:
    """The keys of ``rows`` that nothing reads: how many rows have each, and the number of the first
    one. None if their ``items`` keep complete rows."""
    unread: dict[str, tuple[int, int]] = {}
    if any("row" in item for item in items):
        return unread
    for row in (row for row in rows if isinstance(row, Example)):
        for key in row.unread:
            count, first = unread.get(key) or (0, int(row.origin.rpartition(":")[2]))
            unread[key] = count + 1, first
    return unread


def unread_line(unread: Mapping[str, Sequence[int]]) -> str:
    """These keys as a line of a report."""
    by_row = sorted(unread.items(), key=lambda each: each[1][1])
    keys = (f"{key} ({counted(n, 'row')}, the first {first:,})" for key, (n, first) in by_row)
    return f"keys that nothing reads: {', '.join(keys)}"


EMPTY = Dropped('an empty response (only "weight": 1 on its turn trains on that)')
