"""Tools for agents: what the board's pages show and do, each with a name and typed arguments.

The docstring of a tool is what an agent reads. A tool that changes something is offered only if the
server was started for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ...errors import RunError
from ...recipe.files import read_text
from ..board import Board
from ..commands import ShortCommand, stop
from ..recipe_text import edit, schema
from ..reports import recipes, runs
from ..reports.checkpoint_commands import CheckpointBody, arguments
from ..run_folders import inside, run_inside, typed

Data = dict[str, object]
Run = Annotated[str, Field(description="A run, as list_runs names it.")]
File = Annotated[str, Field(description="A recipe file below ROOT.")]
Count = Annotated[int, Field(ge=1)]
MAX_POINTS = 2000


@dataclass(frozen=True)
class ReadingTools:
    """Tools that change nothing."""

    board: Board

    def list_runs(self, words: str = "") -> Data:
        """All runs with state, evidence, step, loss, metric, speed, size and tags. Only those whose
        name, state, model, method or tags have all of `words`."""
        found = runs.table(self.board)
        return {**found, "runs": [row for row in found["runs"] if runs.matches(row, words)]}  # type: ignore[attr-defined]

    def show_run(self, run: Run) -> Data:
        """One run: its row, recipe, launches, the names of its metrics and of its samples."""
        return runs.details(self.board, run)

    def read_curves(
        self,
        run: Run,
        names: list[str],
        points: Annotated[int, Field(ge=2, le=MAX_POINTS)] = 100,
        first_step: int | None = None,
        last_step: int | None = None,
        smooth: Annotated[int, Field(ge=0, le=10_000)] = 0,
    ) -> Data:
        """Values of metrics by step; of each interval the smallest and the largest. With `smooth`,
        also means over that many logs before and after each value."""
        low = float("-inf") if first_step is None else float(first_step)
        high = float("inf") if last_step is None else float(last_step)
        return runs.series(
            self.board, run, names, points=points, first=low, last=high, smooth=smooth
        )

    def read_log(self, run: Run) -> Data:
        """The end of the log of a run that a board or an agent started."""
        return runs.log(self.board, run)

    def read_samples(self, run: Run, file: str) -> Data:
        """Responses that a run has kept, in one of the files that show_run names."""
        return runs.samples(self.board, run, file)

    def compare_recipes(self, run: Run, other: Run) -> Data:
        """The settings in which the recipes of two runs differ."""
        return runs.diff(self.board, run, other)

    def list_checkpoints(self, run: Run) -> Data:
        """The checkpoints of a run with step, size, loss and problem, and the pinned steps."""
        return runs.checkpoints(self.board, run)

    async def verify_checkpoint(self, run: Run, checkpoint: str) -> Data:
        """Compare every byte of a checkpoint with its hash."""
        body = CheckpointBody(command="verify", run=run, checkpoint=checkpoint)
        return await _answer(self.board.commands.start(*arguments(self.board, body)))

    def recipe_schema(self) -> Data:
        """The JSON schema of recipes, with the meaning of each setting."""
        return schema()

    def list_recipes(self) -> Data:
        """The recipe files below ROOT."""
        return {"files": recipes.files(self.board)}

    def read_recipe(self, file: File) -> Data:
        """The text of a recipe file."""
        return {"file": file, "text": read_text(inside(self.board.root, file))}

    def check_recipe(self, text: str, file: str = "recipe.yaml") -> Data:
        """What is wrong with the text of a recipe, by line, as training would say it."""
        return recipes.checked(self.board, text, file)

    def edit_recipe(self, text: str, keys: list[str], value: object = None) -> Data:
        """The text of a recipe with one setting changed, or removed if `value` is null. Comments
        stay. Nothing is written."""
        changed = edit(text, keys, value)
        return {"text": changed, **recipes.checked(self.board, changed, "recipe.yaml")}

    async def plan(self, file: File) -> Data:
        """Steps, tokens, memory, disk and time of the training of a recipe file; nothing starts."""
        return await self._read_by("plan", file, 1)

    async def preview(self, file: File, count: Count = 4) -> Data:
        """Rows of a recipe file as the model reads them, with the tokens that are trained on."""
        return await self._read_by("preview", file, min(count, 64))

    async def check_data(self, file: File) -> Data:
        """Check all rows of a recipe file: lengths, duplicates, overlap, dropped rows."""
        return await self._read_by("check", file, 1)

    async def _read_by(
        self, command: Literal["plan", "preview", "check"], file: str, count: int
    ) -> Data:
        path = inside(self.board.root, file)
        name = str(path) if self.board.store else typed(self.board.root, path)
        options = ["-n", str(count)] if command == "preview" else []
        words = ["data", "check"] if command == "check" else [command]
        return await _answer(self.board.commands.start(*words, name, "--json", *options))


@dataclass(frozen=True)
class WritingTools:
    """Tools that change something."""

    board: Board

    def tag_run(self, run: Run, add: list[str] = [], remove: list[str] = []) -> Data:  # noqa: B006
        """Add and remove tags of a run."""
        return runs.set_tags(self.board, run, add, remove)

    def pin_checkpoint(self, run: Run, step: int, *, is_pinned: bool = True) -> Data:
        """Keep a checkpoint whatever the retention policy says, or no longer."""
        return runs.set_pin(self.board, run, step, is_pinned=is_pinned)

    def start_run(self, text: str, file: File) -> Data:
        """Write a recipe to a new file below ROOT, and train it in a process of its own, which
        continues when the agent leaves. A file with another text is not replaced."""
        return recipes.start(self.board, recipes.TextBody(text=text, file=file))

    def stop_run(self, run: Run) -> Data:
        """Let a run finish its step, save and exit."""
        stop(run, self.board.summaries.state_of(run_inside(self.board.root, run)))
        return {}

    def resume_run(self, run: Run) -> Data:
        """Train a run further, from its latest valid checkpoint."""
        return {"pid": recipes.resume(self.board, run)}

    async def prune_checkpoints(
        self,
        run: Run,
        keep: Count | None = None,
        keep_every: Count | None = None,
        keep_best: Count | None = None,
        *,
        is_dry_run: bool = True,
    ) -> Data:
        """Delete old checkpoints, or list what would be deleted and why, which is the default. The
        latest, the best and pinned ones stay."""
        body = CheckpointBody(
            command="prune-plan" if is_dry_run else "prune",
            run=run,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
        )
        return await _answer(self.board.commands.start(*arguments(self.board, body)))

    async def export_model(self, run: Run, checkpoint: str, out: str) -> Data:
        """Write a checkpoint as a model to a new folder below ROOT, its adapter merged."""
        body = CheckpointBody(command="export", run=run, checkpoint=checkpoint, out=out)
        return await _answer(self.board.commands.start(*arguments(self.board, body)))


def tools_of(group: ReadingTools | WritingTools) -> list[Callable[..., object]]:
    """The tools of a group."""
    names = [name for name in vars(type(group)) if not name.startswith("_") and name != "board"]
    return [getattr(group, name) for name in names]


async def _answer(job: ShortCommand) -> Data:
    """What a command says. Raises ``RunError`` if it says nothing that can be read."""
    assert job.task is not None
    await asyncio.wait([job.task])
    found = job.as_data()
    if found.get("result") is None and job.code != 0:
        raise RunError(str(found["error"] or f"{job.command}: ended with {job.code}").strip())
    return {name: found[name] for name in ("command", "code", "result", "output")}
