"""The file of answers to a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ...errors import RunError
from ...storage.files import make_folder, raising, write_aside
from ..example import JSON
from .prompts import Prompt


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
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    with raising(RunError, doing):
        write_aside(path, ("\n".join(lines) + "\n").encode(errors="replace"))


def _calls(answer: AnswerText) -> dict[str, object]:
    return {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {}
