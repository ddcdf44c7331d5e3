"""Recipes below ROOT: what is wrong with a text, what a command says of it, and its training."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ...errors import RecipeError, RunError
from ...recipe.files import RUN_RECIPE, read_text
from ...storage.files import write_aside
from ...training.callbacks.training_process import shown
from ..board import Board
from ..commands import ShortCommand
from ..recipe_text import MAX_TEXT, check
from ..run_folders import (
    OutsideRootError,
    below,
    inside,
    is_run,
    name_of,
    new_inside,
    run_inside,
    typed,
)

_DRAFT = ".surefoot-draft-{}.yaml"
_FILE = re.compile(r"[\w][\w. -]*(/[\w][\w. -]*)*\.ya?ml")
_SKIPPED = ("checkpoint-", ".")
_MAX_FILES = 300
_DEMO = "surefoot-demo"  # the folder that `surefoot demo` writes, if none is named


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextBody(_Body):
    """A recipe's text, and the file below ROOT that it is, or will be."""

    text: str = Field(max_length=MAX_TEXT)
    file: str = Field(default="recipe.yaml", max_length=400)


class EditBody(TextBody):
    """One setting to change, or to remove if ``value`` is null."""

    keys: list[str] = Field(min_length=1, max_length=8)
    value: object = None


class TryBody(TextBody):
    """A command that reads the recipe and changes nothing."""

    command: Literal["plan", "preview", "check"]
    dataset: str | None = Field(default=None, max_length=400)
    count: int = Field(default=8, ge=1, le=64)


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


def checked(board: Board, text: str, file: str) -> dict[str, object]:
    """What is wrong with a text, its data, and the run that it begins or resumes."""
    base = _folder_of(board, file)
    found = check(text, base)
    problems, folder = list(found.problems), found.output_dir
    if outside := (folder and _outside(board, folder)) or refusal(board, found.data, base):
        problems.append({"line": None, "column": None, "message": outside})
    is_begun = folder is not None and is_run(board.root / folder)
    return {
        "problems": problems,
        "data": found.data,
        "output_dir": folder,
        "is_begun": is_begun,
    }


def attempt(board: Board, body: TryBody) -> ShortCommand:
    """Start a command that reads the text, which may not be saved yet. Raises ``RunError``."""
    folder = _folder_of(board, body.file)
    if outside := refusal(board, check(body.text, folder).data, folder):
        raise RunError(outside)
    draft = folder / _DRAFT.format(secrets.token_hex(6))
    write_aside(draft, body.text.encode())
    options = ["--json"]
    if body.command == "preview":
        options += ["-n", str(body.count)]
    if body.command != "plan":
        options += ["--dataset", body.dataset] if body.dataset else []
    command = ["data", "check"] if body.command == "check" else [body.command]
    name = typed(board.root, draft)
    as_typed = [*command, body.file, *options]
    try:
        job = board.commands.start(*command, name, *options, typed=as_typed)
    except RunError:
        draft.unlink(missing_ok=True)
        raise
    _delete_after(job, draft)
    return job


def _delete_after(job: ShortCommand, draft: Path) -> None:
    def delete(_: asyncio.Task[None]) -> None:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)

    assert job.task is not None
    job.task.add_done_callback(delete)


def start(board: Board, body: TextBody) -> dict[str, object]:
    """Write the recipe to its file, and train it in a process of its own. Raises
    ``SurefootError``."""
    found = check(body.text, _folder_of(board, body.file))
    if found.problems or found.output_dir is None:
        raise RecipeError("\n".join(str(p["message"]) for p in found.problems))
    outside = _outside(board, found.output_dir)
    if outside := outside or refusal(board, found.data, _folder_of(board, body.file)):
        raise RunError(outside)
    _write(board, body)
    folder = board.root / found.output_dir
    arguments = ["train", body.file]
    pid = board.commands.train(arguments, folder)
    run = folder.resolve().relative_to(board.root).as_posix()
    return {"pid": pid, "run": run, "command": shown(arguments)}


def demo(board: Board) -> dict[str, object]:
    """Train the bundled model on the bundled data, which `surefoot demo` copies to a folder below
    ROOT. Raises ``RunError``."""
    arguments = ["demo", _DEMO]
    folder = below(board.root, f"{_DEMO}/runs/quickstart")
    pid = board.commands.train(arguments, folder)
    return {"pid": pid, "run": name_of(board.root, folder), "command": shown(arguments)}


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
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _texts(value)
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value)
    elif isinstance(data, str) and len(data) < 4096 and "\n" not in data and "\0" not in data:
        yield data


def resume(board: Board, run: str) -> int:
    """Train a run further, from its latest valid checkpoint; the number of the process. Raises
    ``RunError``."""
    folder = run_inside(board.root, run)
    return board.commands.train(["train", f"./{name_of(board.root, folder)}"], folder)


def _write(board: Board, body: TextBody) -> None:
    """Write the file; one with other text is not replaced."""
    if not _FILE.fullmatch(body.file) or any(part == ".." for part in body.file.split("/")):
        raise RunError(f"{body.file}: expected the name of a new file, such as recipes/mine.yaml")
    path = board.root / body.file
    if path.exists():
        if read_text(inside(board.root, body.file), follow=False) != body.text:
            raise RunError(f"{body.file}: exists with another text; choose another name")
        return
    path = new_inside(board.root, body.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, body.text.encode())


def _folder_of(board: Board, file: str) -> Path:
    """The folder that paths of a recipe are relative to, if they exist there."""
    folder = below(board.root, file).parent
    return folder if folder.is_relative_to(board.root) and folder.is_dir() else board.root


def _outside(board: Board, output_dir: str) -> str | None:
    with contextlib.suppress(OutsideRootError):
        if "://" not in output_dir and below(board.root, output_dir) != board.root:
            return None
    return (
        f"train.output_dir: {output_dir} is not a folder below {board.root}, so this board "
        "would not see the run"
    )
