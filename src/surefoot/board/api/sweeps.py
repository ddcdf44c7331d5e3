"""Sweeps: the list, and one of them with its trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query

from ..board import Board
from ..run_folders import find_sweeps, sweep_inside
from ..sweep_summary import sweep_details, sweep_row
from . import Answer

Name = Annotated[str, Query(max_length=4096)]


def routes(board: Board) -> APIRouter:
    """The addresses of sweeps."""
    router = APIRouter(prefix="/api")
    router.get("/sweeps")(_list(board))
    router.get("/sweep")(_details(board))
    return router


def _list(board: Board) -> Callable[..., object]:
    def sweeps() -> Answer:
        """All sweeps below ROOT."""
        found = find_sweeps(board.root)
        rows = [sweep_row(board.root, folder) for folder in found.folders]
        return {"root": str(board.root), "sweeps": rows, "is_cut": found.is_cut}

    return sweeps


def _details(board: Board) -> Callable[..., object]:
    def details(sweep: Name) -> Answer:
        """One sweep: its ranges, trials, and the importance of each setting."""
        folder = sweep_inside(board.root, sweep)
        return sweep_details(board.root, board.summaries, folder)

    return details
