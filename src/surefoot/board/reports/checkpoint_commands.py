"""Commands on checkpoints of a run, as they are called in ROOT."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ...checkpoint.looking.listing import list_run
from ...errors import RunError
from ..board import Board
from ..run_folders import inside, new_inside, run_inside, typed


class CheckpointBody(BaseModel):
    """A command on checkpoints of a run."""

    model_config = ConfigDict(extra="forbid")

    command: Literal["verify", "diff", "prune-plan", "prune", "export"]
    run: str = Field(max_length=4096)
    checkpoint: str | None = Field(default=None, max_length=200)
    other: str | None = Field(default=None, max_length=200)
    out: str | None = Field(default=None, max_length=400)
    keep: int | None = Field(default=None, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: int | None = Field(default=None, ge=1)


def arguments(board: Board, body: CheckpointBody) -> list[str]:
    """The words of the command. Raises ``RunError``."""
    folder = run_inside(board.root, body.run)
    if body.command in ("prune-plan", "prune"):
        keeps = {"keep": body.keep, "keep-every": body.keep_every, "keep-best": body.keep_best}
        options = [f"--{name}={value}" for name, value in keeps.items() if value is not None]
        how = "--dry-run" if body.command == "prune-plan" else "--yes"
        return ["ckpt", "prune", typed(board.root, folder), how, "--json", *options]
    checkpoint = _checkpoint(board, folder, body.checkpoint)
    if body.command == "verify":
        return ["ckpt", "verify", checkpoint, "--json"]
    if body.command == "diff":
        return ["ckpt", "diff", checkpoint, _checkpoint(board, folder, body.other), "--json"]
    if not body.out:
        raise RunError("export: give the name of a new folder")
    out = new_inside(board.root, body.out)
    return ["export", checkpoint, typed(board.root, out)]


def _checkpoint(board: Board, folder: Path, name: str | None) -> str:
    if name not in {line.path.name for line in list_run(folder)}:
        raise RunError(f"{name}: is not a checkpoint of this run (any more)")
    return typed(board.root, inside(board.root, str((folder / str(name)).relative_to(board.root))))
