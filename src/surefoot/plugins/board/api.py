"""What the pages ask for, over HTTP: JSON, and events of the server.

Every answer is an ``Answer``. Names of folders, texts of recipes and messages of errors come from
files that anybody may have written; one that is no Unicode must not take all runs with it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field, PlainSerializer

from ...checkpoint.disk.retention import pin, pinned
from ...checkpoint.looking.listing import list_run
from ...errors import RunError, SurefootError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.yaml import parse
from ...storage import files
from ...storage.folder_lock import lock
from ...terminal_text import plain
from ...training.callbacks.follower import Follower, record
from ...training.callbacks.launches import HEARTBEAT
from ...training.callbacks.launches import NAME as LAUNCHES
from ...training.callbacks.training_process import LOG, shown
from . import recipes, reports
from .board import Board
from .processes import stop
from .recipes import EditBody, PageBody, TextBody, TryBody
from .run_folders import (
    LOCK,
    METRICS,
    OutsideRootError,
    below,
    find_materials,
    inside,
    name_of,
    new_inside,
    run_inside,
    typed,
)
from .run_state import has_begun, state_of
from .samples import read_samples

_LOOK = 1.0  # seconds for the table; 2,000 runs that nobody has looked at take half a minute
_POLL = 0.3  # seconds between looks at the files of a run that is watched
_NOT_LIVE = ("changed", "size", "broken_metrics")
_OF_A_START = {LOCK, LOG, LAUNCHES, HEARTBEAT}  # files of a run before it has begun
_DEMO = "surefoot-demo"  # the folder that `surefoot demo` writes, if none is named
Answer = Annotated[dict[str, object], PlainSerializer(plain)]
Name = Annotated[str, Query(max_length=4096)]


def routes(board: Board) -> APIRouter:
    """All addresses of the pages."""
    router = APIRouter(prefix="/api")
    _add_runs(router, board)
    _add_curves(router, board)
    _add_checkpoints(router, board)
    _add_recipes(router, board)
    _add_chat(router, board)
    return router


def _add_runs(router: APIRouter, board: Board) -> None:
    @router.get("/board")
    def facts() -> Answer:
        """Where the runs are, and what the board may do."""
        return board.facts()

    @router.get("/runs")
    def table() -> Answer:
        """All runs below ROOT."""
        return reports.table(board, _LOOK)

    @router.get("/run")
    def details(run: Name) -> Answer:
        """One run: its row, recipe, launches and files."""
        return reports.details(board, run)

    @router.get("/log")
    def log(run: Name) -> Answer:
        """The end of the log of a run that a board started."""
        return reports.log(board, run)

    @router.get("/samples")
    def samples(run: Name, file: Name) -> Answer:
        """Responses that the run has kept."""
        return read_samples(run_inside(board.root, run), file)

    @router.get("/diff")
    def diff(a: Name, b: Name) -> Answer:
        """The settings that differ between two runs."""
        one, other = (run_inside(board.root, name) for name in (a, b))
        return {"changes": reports.differences(one, other)}

    @router.post("/stop")
    def stop_run(run: Name) -> Answer:
        """Let a run finish its step, save and exit."""
        stop(run, state_of(run_inside(board.root, run)))
        return {}

    @router.post("/resume")
    def resume(run: Name) -> Answer:
        """Train a run further, from its latest valid checkpoint."""
        folder = run_inside(board.root, run)
        return {"pid": board.commands.train(["train", f"./{name_of(board.root, folder)}"], folder)}

    @router.post("/delete")
    def delete(run: Name) -> Answer:
        """Delete the folder of a run that did not begin, if it has only what a start leaves."""
        folder = run_inside(board.root, run)
        if has_begun(folder) or state_of(folder).name in ("running", "unknown"):
            raise RunError(
                f"{run}: has begun or is starting; only a run that did not start is deleted"
            )
        taken = f"{run}: a process has just begun it"
        with lock(folder, RunError, doing="cannot delete", taken=taken):
            names = set(files.list_folder(folder))
            if more := sorted(names - _OF_A_START):
                raise RunError(
                    f"{folder}: has {more[0]}, which no start leaves; delete it yourself"
                )
            with files.raising(RunError, f"cannot delete {folder}"):
                for name in names:
                    (folder / name).unlink()
                folder.rmdir()
        return {}


def _add_curves(router: APIRouter, board: Board) -> None:
    @router.get("/series")
    def series(
        run: Name,
        names: Name,
        points: Annotated[int, Query(ge=2, le=20_000)] = 2000,
        first: float = -math.inf,
        last: float = math.inf,
        smooth: Annotated[int, Query(ge=0, le=10_000)] = 0,
    ) -> Answer:
        """Curves of a run between two steps."""
        return reports.series(
            board, run, names.split(","), points=points, first=first, last=last, smooth=smooth
        )

    @router.get("/live", response_class=EventSourceResponse)
    async def live(run: Name, request: Request) -> AsyncIterator[ServerSentEvent]:
        """New records and the state of a run, as they come."""
        try:
            folder = run_inside(board.root, run)
        except OutsideRootError:  # it vanished before the page listened
            yield ServerSentEvent(event="state", data={"state": "gone"})
            return
        follower = await asyncio.to_thread(lambda: Follower(folder / METRICS).at_end())
        yield ServerSentEvent(event="hello", data={"run": run}, retry=1000)
        before = ""
        while not await request.is_disconnected():
            lines, is_other = await asyncio.to_thread(follower.read)
            if is_other:
                yield ServerSentEvent(event="reset", data={})
            elif rows := [row for line in lines if (row := record(line))]:
                yield ServerSentEvent(event="rows", data={"count": len(rows), "last": rows[-1]})
            facts = await asyncio.to_thread(_now, board, folder)
            if (text := json.dumps(facts)) != before:
                before = text
                yield ServerSentEvent(event="state", data=facts)
            await asyncio.sleep(_POLL)


def _now(board: Board, folder: Path) -> dict[str, object]:
    """What changes while a run trains."""
    if not folder.exists():
        return {"state": "gone"}
    row = board.summaries.of(folder)
    silent = row.get("silent_seconds")
    row["silent_seconds"] = 10 * (silent // 10) if isinstance(silent, float) else None
    return plain({name: value for name, value in row.items() if name not in _NOT_LIVE})  # type: ignore[no-any-return]


class PinBody(PageBody):
    """A checkpoint to keep, or no longer."""

    run: str = Field(max_length=4096)
    step: int = Field(ge=0)
    is_pinned: bool


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


def _add_checkpoints(router: APIRouter, board: Board) -> None:
    @router.get("/checkpoints")
    def checkpoints(run: Name) -> Answer:
        """The checkpoints of a run, oldest first."""
        folder = run_inside(board.root, run)
        try:
            lines = [{**asdict(line), "path": line.path.name} for line in list_run(folder)]
            return {"checkpoints": lines, "pinned": sorted(pinned(folder)), "problem": None}
        except (SurefootError, OSError) as error:
            return {"checkpoints": [], "pinned": [], "problem": str(error)}

    @router.post("/pin")
    def set_pin(body: PinBody) -> Answer:
        """Keep a checkpoint whatever the retention policy says, or no longer."""
        folder = run_inside(board.root, body.run)
        return {"pinned": sorted(pin(folder, body.step, is_pinned=body.is_pinned))}

    @router.post("/checkpoints")
    async def command(body: CheckpointBody) -> Answer:
        """Start a command; its answer is fetched by the number of the job."""
        return board.commands.start(*_arguments(board, body)).as_data()

    @router.get("/job")
    def job(number: int) -> Answer:
        """A command, with its answer if it has ended."""
        return board.commands.find(number).as_data()

    @router.post("/cancel")
    async def cancel(number: int) -> Answer:
        """End a command."""
        found = board.commands.find(number)
        await board.commands.cancel(found)
        return found.as_data()


def _arguments(board: Board, body: CheckpointBody) -> list[str]:
    """The words of the command. Raises ``RunError``."""
    root, folder = board.root, run_inside(board.root, body.run)
    if body.command in ("prune-plan", "prune"):
        keeps = {"keep": body.keep, "keep-every": body.keep_every, "keep-best": body.keep_best}
        options = [f"--{name}={value}" for name, value in keeps.items() if value is not None]
        how = "--dry-run" if body.command == "prune-plan" else "--yes"
        return ["ckpt", "prune", typed(root, folder), how, "--json", *options]
    names, paths = {line.path.name for line in list_run(folder)}, []
    for name in (body.checkpoint, body.other) if body.command == "diff" else (body.checkpoint,):
        if name not in names:
            raise RunError(f"{name}: is not a checkpoint of this run (any more)")
        paths.append(typed(root, inside(root, f"{name_of(root, folder)}/{name}")))
    if body.command != "export":
        return ["ckpt", body.command, *paths, "--json"]
    if not body.out:
        raise RunError("export: give the name of a new folder")
    return ["export", *paths, typed(root, new_inside(root, body.out))]


def _add_recipes(router: APIRouter, board: Board) -> None:
    @router.get("/schema")
    def schema(response: Response) -> Answer:
        """The JSON schema of recipes, of which the form is made."""
        response.headers["Cache-Control"] = "private, max-age=3600"
        return recipes.schema()

    @router.get("/recipes")
    def every() -> Answer:
        """The recipe files below ROOT that are not those of runs."""
        return {"files": recipes.files(board)}

    @router.get("/recipe")
    def recipe(file: str) -> Answer:
        """The text of a recipe file."""
        return {"file": file, "text": read_text(inside(board.root, file), follow=False)}

    @router.get("/materials")
    def materials() -> Answer:
        """The models and files of rows below ROOT."""
        return asdict(find_materials(board.root))

    @router.post("/demo")
    def demo() -> Answer:
        """Train the bundled model on the bundled data, which `surefoot demo` copies to a folder
        below ROOT."""
        arguments, folder = ["demo", _DEMO], below(board.root, f"{_DEMO}/runs/quickstart")
        pid = board.commands.train(arguments, folder)
        return {"pid": pid, "run": name_of(board.root, folder), "command": shown(arguments)}

    @router.post("/check")
    def checked(body: TextBody) -> Answer:
        """What is wrong with a text, and its data."""
        return recipes.checked(board, body)

    @router.post("/edit")
    def edited(body: EditBody) -> Answer:
        """The text with one setting changed, and what is wrong with it now."""
        return recipes.edit(board, body)

    @router.post("/try")
    async def tried(body: TryBody) -> Answer:
        """Start a command that reads the text, which may not be saved yet."""
        return recipes.attempt(board, body).as_data()

    @router.post("/start")
    def start(body: TextBody) -> Answer:
        """Write the recipe to its file, and train it in a process of its own."""
        return recipes.start(board, body)


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


def _add_chat(router: APIRouter, board: Board) -> None:
    @router.post("/chat")
    async def chat(body: ChatBody) -> StreamingResponse:
        """Pieces of the answer as they come, then its tokens with their probabilities."""
        path = _model_of(board, body)
        request = body.model_dump(exclude={"run", "checkpoint"}, exclude_none=True)

        async def lines() -> AsyncIterator[bytes]:
            async for event in board.conversations.answer(path, request):
                yield json.dumps(event).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.post("/chat/close")
    async def close() -> Answer:
        """Close the models, and free their memory."""
        await board.conversations.close()
        return {}


def _model_of(board: Board, body: ChatBody) -> str:
    """What ``surefoot chat`` is called with. Raises ``RunError``."""
    folder = run_inside(board.root, body.run)
    if body.checkpoint != "base":
        name = f"{body.run}/{body.checkpoint}" if body.checkpoint else body.run
        return str(inside(board.root, name))
    data = parse(read_text(folder / RUN_RECIPE, follow=False), RUN_RECIPE).data
    model = data.get("model") if isinstance(data, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        raise RunError(f"{body.run}: its recipe names no model")
    if outside := recipes.refusal(board, path, board.root):
        raise RunError(outside)
    return path
