"""Recipes as text in the browser: what is wrong with one, edits by a form, what a command says of
it, and its training."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import Field

from ...errors import RecipeError, RunError, SurefootError
from ...recipe.files import read_text
from ...recipe.recipe import Recipe, load_text
from ...recipe.yaml import edited, parse
from ...schema import json_schema
from ...storage.files import write_aside
from ...training.callbacks.launches import shown
from .api import Answer, OfBoard, PageBody
from .board import Board
from .run_folders import (
    OutsideRootError,
    below,
    find_materials,
    inside,
    is_run,
    name_of,
    new_inside,
    typed,
)

_MAX_TEXT = 200_000  # characters; a recipe has about two thousand
_NAME = "recipe"
_PLACE = re.compile(rf"{_NAME}:(\d+)(?::(\d+))? ?(.*)", re.DOTALL)
_DRAFT = ".surefoot-draft-{}.yaml"
_FILE = re.compile(r"[\w][\w. -]*(/[\w][\w. -]*)*\.ya?ml")
_DEMO = "surefoot-demo"  # the folder that `surefoot demo` writes, if none is named
routes = APIRouter(prefix="/api")


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
def _schema() -> dict[str, object]:
    return json_schema(Recipe)


@routes.get("/schema")
def schema(response: Response) -> Answer:
    """The JSON schema of recipes, of which the form is made."""
    response.headers["Cache-Control"] = "private, max-age=3600"
    return _schema()


@routes.get("/materials")
def materials(board: OfBoard) -> Answer:
    """The recipes, models and files of rows below ROOT that are not those of runs."""
    return {**find_materials(board.root)}


@routes.get("/recipe")
def recipe(file: str, board: OfBoard) -> Answer:
    """The text of a recipe file."""
    return {"file": file, "text": read_text(inside(board.root, file), follow=False)}


@routes.post("/demo")
def demo(board: OfBoard) -> Answer:
    """Train the bundled model on the bundled data, which `surefoot demo` copies to a folder below
    ROOT."""
    arguments, folder = ["demo", _DEMO], below(board.root, f"{_DEMO}/runs/quickstart")
    pid = board.commands.train(arguments, folder)
    return {"pid": pid, "run": name_of(board.root, folder), "command": shown(arguments)}


@routes.post("/check")
def checked(body: TextBody, board: OfBoard) -> Answer:
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
    if outside := (output_dir and _outside(board, output_dir)) or board.refusal(data, base):
        problems.append(_problem(outside))
    is_begun = output_dir is not None and is_run(board.root / output_dir)
    return {"problems": problems, "data": data, "output_dir": output_dir, "is_begun": is_begun}


def _located(message: str) -> list[dict[str, object]]:
    """The problems in an error of several lines, each with its line and column."""
    problems: list[dict[str, object]] = []
    for line in message.split("\n"):
        if place := _PLACE.fullmatch(line):
            column = int(place[2]) if place[2] else 1
            problems.append(_problem(place[3], int(place[1]), column))
        elif line.startswith(f"{_NAME}: ") or not problems:
            problems.append(_problem(line.removeprefix(f"{_NAME}: ")))
        else:
            problems[-1]["message"] = f"{problems[-1]['message']}\n{line}"
    return problems


def _problem(message: str, line: int | None = None, column: int | None = None) -> dict[str, object]:
    return {"line": line, "column": column, "message": message}


@routes.post("/edit")
def edit(body: EditBody, board: OfBoard) -> Answer:
    """The text with one setting changed or removed, and what is wrong with it now. Raises
    ``RecipeError``."""
    text = edited(body.text, body.keys, body.value)
    return {"text": text, **checked(TextBody(text=text, file=body.file), board)}


@routes.post("/try")
async def attempt(body: TryBody, board: OfBoard) -> Answer:
    """Start a command that reads the text, which may not be saved yet. Raises ``RunError``."""
    folder = _folder_of(board, body.file)
    with contextlib.suppress(RecipeError):  # the command says what is wrong with it
        if outside := board.refusal(parse(body.text, _NAME).data, folder):
            raise RunError(outside)
    # Beside the file that it will be, since a recipe's paths may be relative to its folder.
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

    job.task.add_done_callback(delete)
    return job.as_data()


@routes.post("/start")
def start(body: TextBody, board: OfBoard) -> Answer:
    """Write the recipe to its file, and train it in a process of its own. Raises
    ``SurefootError``."""
    check = checked(body, board)
    problems: Sequence[Mapping[str, object]] = check["problems"]  # type: ignore[assignment]
    if problems:
        raise RecipeError("\n".join(str(problem["message"]) for problem in problems))
    _write(board, body)
    folder = board.root / str(check["output_dir"])
    arguments = ["train", body.file]
    pid = board.commands.train(arguments, folder)
    run = folder.resolve().relative_to(board.root).as_posix()
    return {"pid": pid, "run": run, "command": shown(arguments)}


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
