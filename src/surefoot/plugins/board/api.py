"""What the pages ask for, over HTTP, as JSON.

Every answer is an ``Answer``. Names of folders, texts of recipes and messages of errors come from
files that anybody may have written; one that is no Unicode must not take all runs with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from ...checkpoint.disk.retention import pin, pinned
from ...checkpoint.looking.listing import list_run
from ...errors import RunError, SurefootError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.yaml import parse
from ...terminal_text import plain
from .board import Board, differences, read_samples
from .processes import stop
from .run_folders import (
    OutsideRootError,
    inside,
    name_of,
    new_inside,
    run_inside,
    typed,
)
from .run_state import state_of

_NOT_LIVE = ("changed", "broken_metrics")


def _board_of(request: Request) -> Board:
    return request.app.state.board  # type: ignore[no-any-return]


routes = APIRouter(prefix="/api")
OfBoard = Annotated[Board, Depends(_board_of)]
Answer = Annotated[dict[str, object], PlainSerializer(plain)]
Name = Annotated[str, Query(max_length=4096)]


class PageBody(BaseModel):
    """What a page sends."""

    model_config = ConfigDict(extra="forbid")


@routes.get("/board")
def facts(board: OfBoard) -> Answer:
    """Where the runs are, and what the board may do."""
    return board.facts()


@routes.get("/runs")
def table(board: OfBoard) -> Answer:
    """All runs below ROOT."""
    return board.table()


@routes.get("/run")
def details(run: Name, board: OfBoard) -> Answer:
    """One run: its row, recipe, launches and files."""
    return board.details(run)


@routes.get("/log")
def log(run: Name, board: OfBoard) -> Answer:
    """The end of the log of a run that a board started."""
    return board.log(run)


@routes.get("/samples")
def samples(run: Name, file: Name, board: OfBoard) -> Answer:
    """Responses that the run has kept."""
    return read_samples(run_inside(board.root, run), file)


@routes.get("/diff")
def diff(a: Name, b: Name, board: OfBoard) -> Answer:
    """The settings that differ between two runs."""
    old_run, new_run = (run_inside(board.root, name) for name in (a, b))
    return {"changes": differences(old_run, new_run)}


@routes.get("/series")
def series(
    run: Name,
    names: Name,
    board: OfBoard,
    points: Annotated[int, Query(ge=2, le=20_000)] = 2000,
    first: float = -math.inf,
    last: float = math.inf,
    smooth: Annotated[int, Query(ge=0, le=10_000)] = 0,
) -> Answer:
    """Curves of a run between two steps."""
    return board.series(run, names.split(","), points, first, last, smooth)


@routes.get("/state")
def state(run: Name, board: OfBoard) -> Answer:
    """What changes while a run trains; a page asks twice a second."""
    try:
        folder = run_inside(board.root, run)
    except OutsideRootError:  # it vanished while its page is open
        return {"state": "gone"}
    row = board.summaries.of(folder)
    silent = row["silent_seconds"]
    row["silent_seconds"] = None if silent is None else 10 * (silent // 10)  # a page draws changes
    live = {name: value for name, value in row.items() if name not in _NOT_LIVE}
    return {**live, "num_rows": board.metrics(folder).num_rows}


@routes.post("/stop")
def stop_run(run: Name, board: OfBoard) -> Answer:
    """Let a run finish its step, save and exit."""
    stop(run, state_of(run_inside(board.root, run)))
    return {}


@routes.post("/resume")
def resume(run: Name, board: OfBoard) -> Answer:
    """Train a run further, from its latest valid checkpoint."""
    folder = run_inside(board.root, run)
    return {"pid": board.commands.train(["train", f"./{name_of(board.root, folder)}"], folder)}


@routes.get("/checkpoints")
def checkpoints(run: Name, board: OfBoard) -> Answer:
    """The checkpoints of a run, oldest first."""
    folder = run_inside(board.root, run)
    try:
        lines = [{**asdict(line), "path": line.path.name} for line in list_run(folder)]
        return {"checkpoints": lines, "pinned": sorted(pinned(folder)), "problem": None}
    except (SurefootError, OSError) as error:
        return {"checkpoints": [], "pinned": [], "problem": str(error)}


class PinBody(PageBody):
    """A checkpoint to keep, or no longer."""

    run: str = Field(max_length=4096)
    step: int = Field(ge=0)
    is_pinned: bool


@routes.post("/pin")
def set_pin(body: PinBody, board: OfBoard) -> Answer:
    """Keep a checkpoint whatever the retention policy says, or no longer."""
    folder = run_inside(board.root, body.run)
    return {"pinned": sorted(pin(folder, body.step, is_pinned=body.is_pinned))}


class CheckpointBody(PageBody):
    """A command on checkpoints of a run."""

    command: Literal["verify", "diff", "prune-plan", "prune", "export"]
    run: str = Field(max_length=4096)
    checkpoint: str | None = Field(default=None, max_length=200)
    other: str | None = Field(default=None, max_length=200)
    out: str | None = Field(default=None, max_length=400)
    keep: int | None = Field(default=None, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: int | None = Field(default=None, ge=1)


@routes.post("/checkpoints")
async def command(body: CheckpointBody, board: OfBoard) -> Answer:
    """Start a command; its answer is fetched by the number of the job."""
    # This handler is async, as start() makes a task, which needs the loop of this thread.
    return board.commands.start(*_arguments(board.root, body)).as_data()


def _arguments(root: Path, body: CheckpointBody) -> list[str]:
    """The words of the command. Raises ``RunError``."""
    folder = run_inside(root, body.run)
    if body.command in ("prune-plan", "prune"):
        keeps = {"keep": body.keep, "keep-every": body.keep_every, "keep-best": body.keep_best}
        options = [f"--{name}={value}" for name, value in keeps.items() if value is not None]
        how = "--dry-run" if body.command == "prune-plan" else "--yes"
        return ["ckpt", "prune", typed(root, folder), how, "--json", *options]
    names, paths = {line.path.name for line in list_run(folder)}, []
    for name in (body.checkpoint, body.other) if body.command == "diff" else (body.checkpoint,):
        # Only what is listed: a page may send any text as a name.
        if name not in names:
            raise RunError(f"{name}: is not a checkpoint of this run (any more)")
        paths.append(typed(root, inside(root, f"{name_of(root, folder)}/{name}")))
    if body.command != "export":
        return ["ckpt", body.command, *paths, "--json"]
    if not body.out:
        raise RunError("export: give the name of a new folder")
    return ["export", *paths, typed(root, new_inside(root, body.out))]


class StepBody(PageBody):
    """A step of a run."""

    run: str = Field(max_length=4096)
    step: int = Field(ge=1)


@routes.post("/rows")
async def rows(body: StepBody, board: OfBoard) -> Answer:
    """Start a command that names the rows of a step."""
    folder = typed(board.root, run_inside(board.root, body.run))
    return board.commands.start("rows", folder, "--step", str(body.step)).as_data()


@routes.get("/job")
def job(number: int, board: OfBoard) -> Answer:
    """A command, with its answer if it has ended."""
    return board.commands.find(number).as_data()


@routes.post("/cancel")
async def cancel(number: int, board: OfBoard) -> Answer:
    """End a command."""
    short_command = board.commands.find(number)
    await short_command.cancel()
    return short_command.as_data()


class MessageBody(PageBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "tool"]
    content: str = Field(max_length=200_000)


class ChatBody(PageBody):
    """A conversation with a run: its best or latest checkpoint, one of them, or its base model."""

    run: str = Field(max_length=4096)
    checkpoint: str = Field(default="", max_length=200)  # base: the model before training
    messages: list[MessageBody] = Field(min_length=1, max_length=400)
    system: str | None = Field(default=None, max_length=100_000)
    tools: str | None = Field(default=None, max_length=200_000)  # JSON: schemas of functions
    seed: int | None = None
    max_new_tokens: int | None = Field(default=None, ge=1, le=32_768)
    temperature: float | None = Field(default=None, ge=0, le=100)


@routes.post("/chat")
async def chat(body: ChatBody, board: OfBoard) -> StreamingResponse:
    """Pieces of the answer as they come, then its tokens with their probabilities."""
    path = _model_of(board, body)
    request = body.model_dump(exclude={"run", "checkpoint"}, exclude_none=True)

    async def lines() -> AsyncIterator[bytes]:
        async for event in board.conversations.answer(path, request):
            yield json.dumps(event).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


@routes.post("/chat/close")
async def close(board: OfBoard) -> Answer:
    """Close the models, and free their memory."""
    await board.conversations.close()
    return {}


def _model_of(board: Board, body: ChatBody) -> str:
    """What ``surefoot chat`` is called with. Raises ``RunError``."""
    folder = run_inside(board.root, body.run)
    if body.checkpoint != "base":
        name = f"{body.run}/{body.checkpoint}" if body.checkpoint else body.run
        return str(inside(board.root, name))
    # Without links, which might lead a page to any file of this user.
    data = parse(read_text(folder / RUN_RECIPE, follow=False), RUN_RECIPE).data
    model = data.get("model") if isinstance(data, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        raise RunError(f"{body.run}: its recipe names no model")
    if outside := board.refusal(path, board.root):
        raise RunError(outside)
    return path
