"""Runs: the table, curves, events while one trains, logs, samples, and how two recipes differ."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from ...terminal_text import plain
from ...training.callbacks.follower import Follower, record
from ..board import Board
from ..commands import stop
from ..reports import recipes
from ..reports import runs as reports
from ..run_folders import METRICS, OutsideRootError, run_inside
from ..run_state import state_of
from . import Answer

LOOK = 1.0  # seconds for the table; 2,000 runs that nobody has looked at take half a minute
POLL = 0.3  # seconds between looks at the files of a run that is watched
_LIVE = ("changed", "size", "broken_metrics")
_MAX_POINTS = 20_000
Name = Annotated[str, Query(max_length=4096)]


def routes(board: Board) -> APIRouter:
    """The addresses of runs."""
    router = APIRouter(prefix="/api")
    router.get("/board")(_facts(board))
    router.get("/runs")(_table(board))
    router.get("/run")(_details(board))
    router.get("/series")(_series(board))
    router.get("/live", response_class=EventSourceResponse)(_live(board))
    router.get("/log")(_log(board))
    router.get("/samples")(_samples(board))
    router.get("/diff")(_diff(board))
    router.post("/stop")(_stop(board))
    router.post("/resume")(_resume(board))
    router.post("/delete")(_delete(board))
    return router


def _facts(board: Board) -> Callable[..., object]:
    def facts() -> Answer:
        """Where the runs are, and what the board may do."""
        return board.facts()

    return facts


def _table(board: Board) -> Callable[..., object]:
    def table() -> Answer:
        """All runs below ROOT."""
        return reports.table(board, LOOK)

    return table


def _details(board: Board) -> Callable[..., object]:
    def details(run: Name, *, excerpt: bool = False) -> Answer:
        """One run: its row, recipe, launches and files."""
        return reports.details(board, run, may_be_excerpt=excerpt)

    return details


def _series(board: Board) -> Callable[..., object]:
    def series(
        run: Name,
        names: Name,
        points: Annotated[int, Query(ge=2, le=_MAX_POINTS)] = 2000,
        first: float = -math.inf,
        last: float = math.inf,
        smooth: Annotated[int, Query(ge=0, le=10_000)] = 0,
        *,
        excerpt: bool = False,
    ) -> Answer:
        """Curves of a run between two steps; with ``excerpt`` at once, of some lines at first."""
        return reports.series(
            board,
            run,
            names.split(","),
            points=points,
            first=first,
            last=last,
            smooth=smooth,
            may_be_excerpt=excerpt,
        )

    return series


def _live(board: Board) -> Callable[..., object]:
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
            await asyncio.sleep(POLL)

    return live


def _now(board: Board, folder: Path) -> dict[str, object]:
    """What changes while a run trains."""
    if not folder.exists():
        return {"state": "gone"}
    row = board.summaries.of(folder)
    silent = row.get("silent_seconds")
    row["silent_seconds"] = 10 * (silent // 10) if isinstance(silent, float) else None
    return plain({name: value for name, value in row.items() if name not in _LIVE})  # type: ignore[no-any-return]


def _log(board: Board) -> Callable[..., object]:
    def log(run: Name) -> Answer:
        """The end of the log of a run that a board started."""
        return reports.log(board, run)

    return log


def _samples(board: Board) -> Callable[..., object]:
    def samples(run: Name, file: Name) -> Answer:
        """Responses that the run has kept."""
        return reports.samples(board, run, file)

    return samples


def _diff(board: Board) -> Callable[..., object]:
    def diff(a: Name, b: Name) -> Answer:
        """The settings that differ between two runs."""
        return reports.diff(board, a, b)

    return diff


def _stop(board: Board) -> Callable[..., object]:
    def stop_run(run: Name) -> Answer:
        """Let a run finish its step, save and exit."""
        folder = run_inside(board.root, run)
        stop(run, state_of(folder))
        return {}

    return stop_run


def _resume(board: Board) -> Callable[..., object]:
    def resume(run: Name) -> Answer:
        """Train a run further, from its latest valid checkpoint."""
        return {"pid": recipes.resume(board, run)}

    return resume


def _delete(board: Board) -> Callable[..., object]:
    def delete(run: Name) -> Answer:
        """Delete the folder of a run that did not begin."""
        return reports.delete(board, run)

    return delete
