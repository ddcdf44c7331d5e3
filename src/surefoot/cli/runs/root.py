"""ROOT of runs on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import RunError

if TYPE_CHECKING:
    from ...board.board import Board

ROOT = click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True)


def opened_run(run: Path) -> Board:
    """The board of a run alone. Raises ``RunError`` if it is none."""
    from ...board.board import Board
    from ...board.run_folders import is_run

    if not is_run(run):
        raise RunError(f"{run}: is not a run; surefoot runs ls {run} lists those below it")
    return Board(run)
