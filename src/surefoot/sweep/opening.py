"""From a command line to a sweep: everything is checked before a folder or a trial exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecipeError, RunError
from ..parallel.launch_environment import launched
from . import files
from .objective import Objective, choose_objective
from .sampling import SAMPLERS
from .space import Space, open_space
from .spec import settle, spec_of
from .study import open_study
from .sweep import SearchSettings, Sweep
from .trial_process import environments

TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of the command."""

    trials: int | None = None
    sampler: str = SAMPLERS[0]
    jobs: int = 1
    output: Path | None = None
    metric: str | None = None
    direction: str | None = None
    pruner: str = "none"
    prune_after: int = 4
    seed: int = 0


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep that has been checked, and not begun."""

    space: Space
    objective: Objective
    search: SearchSettings
    output: Path
    trials: int
    jobs: int


def prepare(recipe: Path, ranges: Sequence[str], options: SweepOptions) -> PreparedSweep:
    """The sweep of a command line. Raises ``SurefootError``."""
    if launched() is not None:
        raise RunError(
            "a sweep is one process, which starts the ranks of its trials; start it without "
            "torchrun or srun, and set parallel.num_processes"
        )
    space = open_space(recipe, ranges)
    objective = choose_objective(space.base, space.keys, options.metric, options.direction)
    search = SearchSettings(options.sampler, options.seed, options.pruner, options.prune_after)
    output = options.output or _default_output(space)
    return PreparedSweep(
        space, objective, search, output.absolute(), _num_trials(space, options), options.jobs
    )


def begin(prepared: PreparedSweep, devices: Sequence[str], tell: Callable[[str], None]) -> Sweep:
    """The sweep in its folder, whose lock this process holds. Raises ``RunError`` if the folder
    contains another one."""
    space, objective, search = prepared.space, prepared.objective, prepared.search
    settle(prepared.output, space, spec_of(space, objective, search))
    return Sweep(
        output=prepared.output,
        space=space,
        objective=objective,
        search=search,
        study=open_study(prepared.output, space.keys, objective.direction),
        num_trials=prepared.trials,
        environments=environments(prepared.jobs, devices, _num_cores()),
        tell=tell,
    )


def _default_output(space: Space) -> Path:
    folder = space.base.train.output_dir
    if not isinstance(folder, Path):
        raise RunError(
            f"train.output_dir: {folder} is a URL, and the trials of a sweep are in a local "
            "folder; name it with --output"
        )
    return folder.with_name(f"{folder.name}-sweep")


def _num_trials(space: Space, options: SweepOptions) -> int:
    if options.sampler != "grid":
        return options.trials or TRIALS
    endless = [key for key in space.keys if key.values.count is None]
    if endless:
        raise RecipeError(
            f"command line: {endless[0].key}={endless[0].text}: a grid needs values that can be "
            "counted; list them (1e-5,1e-4,1e-3), give a step (0..0.5:0.1), or use --sampler random"
        )
    assert space.size is not None
    return min(options.trials or space.size, space.size)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def study_exists(output: Path) -> bool:
    """Whether the sweep has begun before."""
    return (output / files.STUDY).exists()
