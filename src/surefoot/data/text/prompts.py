"""Prompts: a text; or a file with one per line, or one per row of a file of rows, among them every
row that training reads.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ...errors import DataError, RunError
from ...storage.files import MAX_JSON, make_folder, raising, read_file, reading, write_aside
from ..example import JSON, BrokenRow, Example, Message, unread_line
from ..rows._readers import text_lines
from ..rows._row_sources import Files
from ..rows.catalog import Catalog
from ..rows.formats import Format
from ..rows.formats.fields import DECODER, shown, tools
from ..rows.registry import recognized
from ..rows.rows import Reading, form_of, parse_row, unread_keys
from ..section import DataSection

_LINES = (".jsonl", ".ndjson")
_TABLES = (".json", ".csv", ".parquet", ".arrow")
EXPECTED = "expected"  # what the answer of a row becomes, beside the one that is generated
_ANSWER = ("answer", "finish_reason", "tool_calls")  # what is written beside a prompt
Forms = Sequence[tuple[Format, tuple[str, ...]]]  # of a run's datasets, with their columns
_USUAL = "'messages', 'conversations', 'instruction', 'prompt', 'question'"


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends in a user turn."""

    origin: str  # "prompts.jsonl: line 3"
    messages: tuple[Message, ...]
    tools: tuple[JSON, ...] = ()
    template_arguments: JSON = field(default_factory=dict)  # of its row, beside the recipe's
    row: Mapping[str, object] = field(default_factory=dict)  # what stands in the file
    example: Example = Example()  # the row as a dataset's
    form: Format | None = None  # of the row

    def with_system(self, text: str | None) -> Prompt:
        """The same with a system message in front, if it has none of its own."""
        if not text or self.messages[0].role == "system":
            return self
        return replace(self, messages=(Message("system", text), *self.messages))


def read_prompts(path: Path, section: DataSection | None = None) -> list[Prompt]:
    """All prompts of a file, in order. Blank lines are ignored.

    A row (of JSON, JSON Lines, CSV, Parquet or Arrow) has the columns of an entry of ``section``,
    which a model was trained by, or ``prompt``, ``messages``, ``conversations`` or ``instruction``,
    as in a dataset. A response that ends it is not part of the prompt; all fields are kept. A line
    of any other file is a prompt as it is.

    Raises ``DataError``: the file is missing or contains no prompt, or a line or row is invalid.
    """
    try:
        is_rows = path.suffix.lower() in (*_TABLES, *_LINES)
        prompts = list(_prompts(path, Catalog(section).forms() if section and is_rows else ()))
    except OSError as error:
        raise DataError(f"{path}: prompts cannot be read: {error.strerror}") from None
    if not prompts:
        raise DataError(f"{path}: contains no prompt; expected one per line")
    return prompts


def prompt_of(text: str, origin: str) -> Prompt:
    """A text of the command line. Raises ``DataError``: it is blank, or no text."""
    if not text.strip():
        raise DataError(f"{origin}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # a byte of the command line that the locale does not know
        raise DataError(f"{origin}: is not UTF-8 text") from None
    return Prompt(origin, (Message("user", text),), row={"prompt": text})


def _prompts(path: Path, forms: Forms) -> Iterator[Prompt]:
    suffix = path.suffix.lower()
    rows: Iterator[tuple[str, object]]
    if suffix in _TABLES:
        rows = ((f"row {index}", row) for index, row in enumerate(Files((path,)).rows()))
    else:
        rows = ((f"line {number}", line) for number, line in text_lines(path))
    for place, row in rows:
        origin = f"{path}: {place}"
        try:
            if suffix in (*_TABLES, *_LINES):
                parsed = DECODER.decode(row) if isinstance(row, str) else row
                yield _of_row(parsed, forms, origin)
            elif "\0" in (line := str(row)):
                raise DataError(
                    "a NUL character, so this is not a text file; expected one prompt per line"
                )
            else:
                yield Prompt(origin, (Message("user", line),), row={"prompt": line})
        except (DataError, ValueError, RecursionError) as error:
            raise DataError(f"{origin}: {error}") from None


def _of_row(row: object, forms: Forms, origin: str) -> Prompt:
    if isinstance(row, BrokenRow):
        raise DataError(row.reason)
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {shown(row)}")
    fields = {EXPECTED if name == "answer" else name: value for name, value in row.items()}
    reserved = [name for name in _ANSWER if name in fields]
    if len(fields) < len(row) or reserved:
        name = reserved[0] if reserved else "answer"
        raise DataError(f"the key {name!r} is used for the response; give it another name")
    form = form_of(row, forms) or recognized([row])  # with an answer or not, as in a dataset
    if form is None:
        columns = ", ".join(row) or "none"
        raise DataError(f"expected one of the keys {_USUAL} (keys found: {columns})")
    example = parse_row(form, row)
    messages = example.messages
    if len(messages) > 1 and messages[-1].role == "assistant":
        messages = messages[:-1]  # the response of a row of a dataset
    if messages[-1].role not in ("user", "tool"):
        raise DataError(f"the last message is of the {messages[-1].role}; expected the user")
    if messages[-1].is_empty and messages[-1].role == "user":
        raise DataError("the prompt is empty")
    arguments = example.template_arguments
    return Prompt(origin, messages, example.tools, arguments, fields, example, form)


def unread_line_of(prompts: Sequence[Prompt], reading: Reading) -> str | None:
    """What nothing reads of the rows of prompts, though it goes into the answers; None if all is
    read. Raises ``DataError``: a text has the mark of a picture that its row does not have."""
    unread: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        if prompt.form is None:
            continue
        try:
            keys = unread_keys(prompt.example, prompt.form, reading)
        except DataError as error:
            raise DataError(f"{prompt.origin}: {error}") from None
        for key in keys:
            unread.setdefault(key, [0, number])[0] += 1
    return unread_line(unread) if unread else None


def read_tools(path: Path) -> tuple[JSON, ...]:
    """The schemas of functions in a JSON file. Raises ``DataError``: it is missing, or no list of
    schemas."""
    with reading(DataError, f"--tools {path}"):
        text = read_file(path, MAX_JSON).decode()
    try:
        schemas = tools({"tools": text}, "tools")
    except DataError as error:
        raise DataError(f"--tools {path}: {error}") from None
    if not schemas:
        raise DataError(f"--tools {path}: contains no function schema; expected a JSON list")
    return schemas


class AnswerText(Protocol):
    """An answer, and why it ended."""

    @property
    def text(self) -> str:
        """What was generated."""

    @property
    def finish_reason(self) -> str:
        """stop, length or context."""

    @property
    def tool_calls(self) -> Sequence[JSON]:
        """The calls in the text, if the prompt has tools."""


def check_output(path: Path, *, force: bool) -> None:
    """Before the work: nothing is overwritten by mistake, and there is a place to write to. Raises
    ``RunError``: ``path`` is a folder, or there already and not to be replaced by ``force``."""
    if path.is_dir():
        raise RunError(f"--output {path}: is a folder; expected the name of a file")
    if path.exists() and not force:
        raise RunError(f"--output {path}: it exists; choose another name, or add --force")
    with raising(RunError, "cannot write the answers"):
        make_folder(path.absolute().parent)


def write_answers(
    path: Path, prompts: Sequence[Prompt], answers: Sequence[AnswerText], *, doing: str
) -> None:
    """One JSON object a line: the prompt's own, answer, finish_reason, and the tool calls if there
    are any. Raises ``RunError``, which begins with ``doing``."""
    pairs = zip(prompts, answers, strict=True)
    rows = [
        {**p.row, "answer": a.text, "finish_reason": a.finish_reason, **_calls(a)} for p, a in pairs
    ]
    write_rows(path, rows, doing=doing)


def write_rows(path: Path, rows: Sequence[Mapping[str, object]], *, doing: str) -> None:
    """One JSON object a line; an old file is replaced. Raises ``RunError``, which begins with
    ``doing``."""
    lines = [json.dumps(row, ensure_ascii=False, default=_as_text) for row in rows]
    with raising(RunError, doing):
        write_aside(path, ("\n".join(lines) + "\n").encode(errors="replace"))


def _as_text(value: object) -> str:
    """What JSON has no form for: the bytes of a picture, say, in a row of Parquet."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _calls(answer: AnswerText) -> dict[str, object]:
    return {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {}
