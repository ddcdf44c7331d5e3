"""Recipes as text in the browser: what is wrong with one, edits by a form, what a command says of
it, and its training."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ...errors import RecipeError, RunError, SurefootError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.recipe import Recipe, load_text
from ...recipe.yaml import edited, parse
from ...schema import json_schema
from ...storage.files import write_aside
from ...training.callbacks.training_process import shown
from .board import Board
from .processes import ShortCommand
from .run_folders import OutsideRootError, below, inside, is_run, name_of, new_inside, typed

_MAX_TEXT = 200_000  # characters; a recipe has about two thousand
_NAME = "recipe"
_PLACE = re.compile(rf"{_NAME}:(\d+)(?::(\d+))? ?(.*)", re.DOTALL)
_DRAFT = ".surefoot-draft-{}.yaml"
_FILE = re.compile(r"[\w][\w. -]*(/[\w][\w. -]*)*\.ya?ml")
_SKIPPED = ("checkpoint-", ".")
_MAX_FILES = 300


class PageBody(BaseModel):
    """What a page sends."""

    model_config = ConfigDict(extra="forbid")


class TextBody(PageBody):
    """A recipe's text, and the file below ROOT that it is, or will be."""

    text: str = Field(max_length=_MAX_TEXT)
    file: str = Field(default="recipe.yaml", max_length=400)


class EditBody(TextBody):
    """One setting to change, or to remove if ``value`` is null."""

    keys: list[str] = Field(min_length=1, max_length=8)
    value: object = None


class TryBody(TextBody):
    """A command that reads the recipe and changes nothing."""

    command: Literal["plan", "preview", "check"]
    count: int = Field(default=8, ge=1, le=64)


@cache
def schema() -> dict[str, object]:
    """The JSON schema of recipes."""
    return json_schema(Recipe)


def files(board: Board) -> list[str]:
    """The recipe files below ROOT that are not those of runs."""
    found: list[str] = []
    for depth in ("*.yaml", "*.yml", "*/*.yaml", "*/*.yml", "*/*/*.yaml"):
        for path in sorted(board.root.glob(depth)):
            parts = path.relative_to(board.root).parts
            is_hidden = any(part.startswith(_SKIPPED) for part in parts)
            is_of_run = path.name == RUN_RECIPE and is_run(path.parent)
            if not is_hidden and not is_of_run and len(found) < _MAX_FILES:
                found.append(name_of(board.root, path))
    return found


def checked(board: Board, body: TextBody) -> dict[str, object]:
    """What is wrong with a text, its data, and the run that it begins or resumes: as `surefoot
    train` says it, without opening models or datasets."""
    base = _folder_of(board, body.file)
    problems: list[dict[str, object]] = []
    data: object = None
    output_dir: str | None = None
    try:
        data = {} if not body.text.strip() else parse(body.text, _NAME).data
        if not body.text.strip():
            raise RecipeError("there is no recipe yet")
        output_dir = str(load_text(body.text, _NAME, base).train.output_dir)
    except SurefootError as error:
        problems = _located(str(error))
    if outside := (output_dir and _outside(board, output_dir)) or refusal(board, data, base):
        problems.append(_problem(outside))
    is_begun = output_dir is not None and is_run(board.root / output_dir)
    return {"problems": problems, "data": data, "output_dir": output_dir, "is_begun": is_begun}


def _located(message: str) -> list[dict[str, object]]:
    """The problems in an error of several lines, each with its line and column."""
    found: list[dict[str, object]] = []
    for line in message.split("\n"):
        if place := _PLACE.fullmatch(line):
            column = int(place[2]) if place[2] else 1
            found.append(_problem(place[3], int(place[1]), column))
        elif line.startswith(f"{_NAME}: ") or not found:
            found.append(_problem(line.removeprefix(f"{_NAME}: ")))
        else:
            found[-1]["message"] = f"{found[-1]['message']}\n{line}"
    return found


def _problem(message: str, line: int | None = None, column: int | None = None) -> dict[str, object]:
    return {"line": line, "column": column, "message": message}


def edit(board: Board, body: EditBody) -> dict[str, object]:
    """The text with one setting changed or removed, and what is wrong with it now. Raises
    ``RecipeError``."""
    text = edited(body.text, body.keys, body.value)
    return {"text": text, **checked(board, TextBody(text=text, file=body.file))}


def attempt(board: Board, body: TryBody) -> ShortCommand:
    """Start a command that reads the text, which may not be saved yet. Raises ``RunError``."""
    folder = _folder_of(board, body.file)
    with contextlib.suppress(RecipeError):  # the command says what is wrong with it
        if outside := refusal(board, parse(body.text, _NAME).data, folder):
            raise RunError(outside)
    draft = folder / _DRAFT.format(secrets.token_hex(6))
    write_aside(draft, body.text.encode())
    options = ["--json", *(["-n", str(body.count)] if body.command == "preview" else [])]
    command = ["data", "check"] if body.command == "check" else [body.command]
    as_typed = [*command, body.file, *options]
    try:
        job = board.commands.start(*command, typed(board.root, draft), *options, typed=as_typed)
    except RunError:
        draft.unlink(missing_ok=True)
        raise

    def delete(_: asyncio.Task[None]) -> None:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)

    assert job.task is not None
    job.task.add_done_callback(delete)
    return job


def start(board: Board, body: TextBody) -> dict[str, object]:
    """Write the recipe to its file, and train it in a process of its own. Raises
    ``SurefootError``."""
    found = checked(board, body)
    problems: Sequence[Mapping[str, object]] = found["problems"]  # type: ignore[assignment]
    if problems:
        raise RecipeError("\n".join(str(problem["message"]) for problem in problems))
    _write(board, body)
    folder = board.root / str(found["output_dir"])
    arguments = ["train", body.file]
    pid = board.commands.train(arguments, folder)
    run = folder.resolve().relative_to(board.root).as_posix()
    return {"pid": pid, "run": run, "command": shown(arguments)}


def refusal(board: Board, data: object, base: Path) -> str | None:
    """Why a recipe, or a text of one, names a file that this board does not open."""
    if board.folders is None:
        return None
    roots = [board.root, *board.folders]
    for text in _texts(data):
        is_file = text.startswith("file:")
        if "://" in text and not is_file:
            continue
        path = re.sub("^file:/*", "/", text) if is_file else os.path.expanduser(text)  # noqa: PTH111
        for start in {base, board.root}:
            found = Path(os.path.realpath(start / path))
            if not any(found.is_relative_to(root) for root in roots):
                return (
                    f"{text[:200]!r} is outside of {board.root}; start the board with "
                    "--folder PATH to let recipes name models and datasets in another folder"
                )
    return None


def _texts(data: object) -> Iterator[str]:
    """All texts in a recipe that may be paths."""
    if isinstance(data, Mapping | list):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _texts(value)
    elif isinstance(data, str) and len(data) < 4096 and "\n" not in data and "\0" not in data:
        yield data


def _write(board: Board, body: TextBody) -> None:
    """Write the file; one with other text is not replaced."""
    if not _FILE.fullmatch(body.file) or any(part == ".." for part in body.file.split("/")):
        raise RunError(f"{body.file}: expected the name of a new file, such as recipes/mine.yaml")
    if (board.root / body.file).exists():
        if read_text(inside(board.root, body.file), follow=False) != body.text:
            raise RunError(f"{body.file}: exists with another text; choose another name")
        return
    path = new_inside(board.root, body.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, body.text.encode())


def _folder_of(board: Board, file: str) -> Path:
    """The folder that paths of a recipe are relative to, if they exist there."""
    folder = below(board.root, file).parent
    return folder if folder.is_dir() else board.root


def _outside(board: Board, output_dir: str) -> str | None:
    with contextlib.suppress(OutsideRootError):
        if "://" not in output_dir and below(board.root, output_dir) != board.root:
            return None
    return (
        f"train.output_dir: {output_dir} is not a folder below {board.root}, so this board "
        "would not see the run"
    )
