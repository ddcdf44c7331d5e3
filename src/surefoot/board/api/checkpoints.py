"""Checkpoints: the time line of a run, and the commands that check, compare, prune and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from ..board import Board
from ..reports import runs as reports
from ..reports.checkpoint_commands import CheckpointBody, arguments
from . import Answer

Name = Annotated[str, Query(max_length=4096)]


class PinBody(BaseModel):
    """A checkpoint to keep, or no longer."""

    model_config = ConfigDict(extra="forbid")

    run: str = Field(max_length=4096)
    step: int = Field(ge=0)
    is_pinned: bool


def routes(board: Board) -> APIRouter:
    """The addresses of checkpoints and of the commands that were started."""
    router = APIRouter(prefix="/api")
    router.get("/checkpoints")(_checkpoints(board))
    router.post("/checkpoints")(_command(board))
    router.post("/pin")(_pin(board))
    router.get("/job")(_job(board))
    router.post("/cancel")(_cancel(board))
    return router


def _checkpoints(board: Board) -> Callable[..., object]:
    def checkpoints(run: Name) -> Answer:
        """The checkpoints of a run, oldest first."""
        return reports.checkpoints(board, run)

    return checkpoints


def _command(board: Board) -> Callable[..., object]:
    async def command(body: CheckpointBody) -> Answer:
        """Start a command; its answer is fetched by the number of the job."""
        return board.commands.start(*arguments(board, body)).as_data()

    return command


def _pin(board: Board) -> Callable[..., object]:
    def set_pin(body: PinBody) -> Answer:
        """Keep a checkpoint whatever the retention policy says, or no longer."""
        return reports.set_pin(board, body.run, body.step, is_pinned=body.is_pinned)

    return set_pin


def _job(board: Board) -> Callable[..., object]:
    def job(number: int) -> Answer:
        """A command, with its answer if it has ended."""
        return board.commands.find(number).as_data()

    return job


def _cancel(board: Board) -> Callable[..., object]:
    async def cancel(number: int) -> Answer:
        """End a command."""
        found = board.commands.find(number)
        await board.commands.cancel(found)
        return found.as_data()

    return cancel
