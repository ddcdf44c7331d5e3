"""Recognition of a dataset whose entry does not say what its rows look like, by their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .formats import Format
from .formats.alpaca import Alpaca
from .formats.fields import Row, structure
from .formats.openai import OpenAI
from .formats.sharegpt import ShareGPT
from .formats.trl import TRL
from .row_sources import BrokenRow

LOOK, MOST = 20, 1000  # rows; the larger number if a column of the first ones has only nulls
RESPONSES = ("output", "response", "completion", "answer")
PROMPTS = ("instruction", "prompt", "question")
MARKS = ("label", "kto_tag")
FORMS = (  # the usual columns of each form, for errors
    *("messages", "conversations", "instruction, output", "prompt, completion"),
    *("prompt, completion, label", "prompt, chosen, rejected", "text"),
)


def recognized(rows: Iterable[Row | BrokenRow]) -> Format | None:
    """The format of the first ``rows``; None if they are broken, absent, or of no known form."""
    columns: dict[str, object] = {}  # the first value of each, None of those that have none
    for count, row in enumerate(rows, 1):
        if not isinstance(row, BrokenRow):
            columns |= {k: v for k, v in row.items() if columns.get(k) is None}
        if count >= LOOK and (count >= MOST or None not in columns.values()):
            break
    return _format(columns)


def _format(columns: Row) -> Format | None:
    """The format of rows with these columns."""
    row = {name: value for name, value in columns.items() if value is not None}
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _ranking(row)
    for name in ("messages", "conversations"):
        if name in row:
            return _conversations(row, name)
    return _single(row, columns)


def _ranking(row: Row) -> Format:
    """The format of rows with two responses."""
    chosen = row["chosen"]
    is_answer = not isinstance(chosen, list) or len(chosen) <= 1
    if "instruction" in row:
        return Alpaca(ranking=True)
    for name in ("messages", "conversations"):
        if name in row and is_answer:
            return replace(_conversations(row, name), ranking=True)
    return TRL(prompt="prompt" if "prompt" in row else None, ranking=True)


def _conversations(row: Row, name: str) -> OpenAI | ShareGPT:
    """The format of rows with turns."""
    turns = structure(row, name)
    first = turns[0] if isinstance(turns, list) and turns else None
    is_sharegpt = "from" in first if isinstance(first, Mapping) else name == "conversations"
    return ShareGPT(messages=name) if is_sharegpt else OpenAI(messages=name)


def _single(row: Row, columns: Row) -> Format | None:
    """The format of rows with one response in a column of its own, or of plain text. ``columns``
    has those without a value, too: a response is one where all that were seen are null."""
    prompt = next((name for name in PROMPTS if name in row), None)
    named = (name for some in (row, columns) for name in RESPONSES if name in some)
    response = next(named, "output")
    if prompt == "prompt" and response == "completion":
        mark = next((name for name in MARKS if isinstance(row.get(name), bool)), None)
        return TRL(kto_tag=mark)
    if isinstance(row.get("prompt"), list):
        return TRL()
    if prompt:
        query = "context" if "context" in row and "input" not in row else "input"
        return Alpaca(prompt=prompt, response=response, query=query)
    return Alpaca(prompt="text", query=None) if "text" in row else None
