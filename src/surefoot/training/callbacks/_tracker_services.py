"""The trackers that a run can be logged to: W&B, SwanLab, Trackio and MLflow. No torch.

Each is a function that opens a run of the tracker's own package, in the process of
``_tracker_process``, which is the only one to import these packages. All launches of a run are one
curve: it is opened again by an id of its own.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .launches import redacted

Facts = Mapping[str, object]


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it."""

    folder: Path  # of the run
    files: Path  # a folder for the tracker's own
    id: str  # the same in every launch
    name: str
    project: str | None  # None: as the package's own environment variable says
    config: Facts  # the recipe
    is_offline: bool = False  # nothing is to leave the machine

    def project_or(self, usual: str | None) -> str:
        """The project that the recipe names, or the ``usual`` one of this machine."""
        return self.project or usual or "surefoot"


class Tracker(Protocol):
    """A run that is open in a tracker."""

    @property
    def place(self) -> str:
        """Where its curves are, or how they get there, in one clause."""

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Add a record of ``metrics.jsonl``, which is line number ``line`` of all that were sent
        to this run, from 1."""

    def event(self, name: str, facts: Facts) -> None:
        """Something has happened to the run besides metrics, such as ``nan``."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """The launch has ended: ``complete``, ``stopped``, ``failed`` or ``died``."""


@dataclass
class Service:
    """A run that its package can log to and finish, as Trackio's. It is opened with
    ``resume="allow"`` and an id of its own, so all launches are one curve."""

    run: Any
    place: str

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step."""
        self.run.log(scalars(record), step=step)

    def event(self, name: str, facts: Facts) -> None:
        """It shows metrics only."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """Write or send what remains."""
        self.run.finish()


def scalars(record: Mapping[str, float]) -> dict[str, float]:
    """``loss`` as ``train/loss``, ``eval_loss`` as ``eval/loss``, as the Hugging Face Trainer names
    them."""
    return {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in record.items()
        if name not in ("step", "epoch")
    }


def _opened(
    tracked: TrackedRun,
    variable: str,
    offline_modes: Mapping[str, str],
    opened: Callable[[str], Any],
    command: Callable[[Any], str],
) -> tuple[Any, str, bool]:
    """A run that is ``opened`` in the mode of the environment ``variable``, where it is, and
    whether it is online. Without a login, or where the service does not answer, it is written
    offline, and ``command`` sends it."""
    mode, why = os.environ.get(variable, "online").lower(), ""
    if mode == "disabled":
        return opened(mode), f"nowhere, as {variable} is disabled", False
    if not tracked.is_offline and mode not in offline_modes:
        try:
            return opened("online"), "", True
        except Exception as error:  # whatever the package raises, the run is not to miss its curve
            why = f", as it cannot be opened online ({error})"
    mode = offline_modes.get(mode, "offline")
    run = opened(mode)
    return run, f"{mode}{why}; `{command(run)}` sends it", False


STEP = "train/global_step"  # W&B's x axis, as the Hugging Face Trainer has it


@dataclass
class WandB(Service):
    """Weights & Biases."""

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """W&B's own step is the number of the line, which only grows: it drops a smaller one."""
        self.run.log({**scalars(record), STEP: step}, step=line)

    def finish(self, outcome: str, facts: Facts) -> None:
        """A launch that a signal stopped is not a failure."""
        self.run.finish(exit_code=0 if outcome in ("complete", "stopped") else 1)


def wandb(tracked: TrackedRun) -> WandB:
    """The run in Weights & Biases."""

    def opened(mode: str) -> Any:
        import wandb as package

        run: Any = package.init(
            project=tracked.project_or(os.environ.get("WANDB_PROJECT")),
            name=tracked.name,
            id=tracked.id,
            resume="allow",
            dir=str(tracked.files),
            config=dict(tracked.config),
            allow_val_change=True,
            mode=mode,
            settings=package.Settings(silent=True, console="off", disable_git=True),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    def command(run: Any) -> str:
        return f"wandb sync {Path(run.dir).parent}"

    offline_modes = {"offline": "offline", "dryrun": "offline"}
    run, place, is_online = _opened(tracked, "WANDB_MODE", offline_modes, opened, command)
    return WandB(run, str(run.url) if is_online else place)


@dataclass
class SwanLab(Service):
    """SwanLab."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """``success``, ``aborted`` or ``crashed``, with the error."""
        state = {"complete": "success", "stopped": "aborted"}.get(outcome, "crashed")
        error = str(facts.get("error") or outcome) if state == "crashed" else None
        self.run.finish(state=state, error=error)


def swanlab(tracked: TrackedRun) -> SwanLab:
    """The run in SwanLab."""

    def opened(mode: str) -> Any:
        import swanlab as package

        settings = package.Settings(interactive=False)
        return package.init(
            project=tracked.project_or(settings.project.name),
            name=tracked.name,
            id=tracked.id,
            resume="allow",
            log_dir=str(tracked.files),
            config=dict(tracked.config),
            mode=mode,
            reinit=True,
            settings=settings,
        )

    def command(_: Any) -> str:  # the folders' names begin with times
        return f"swanlab sync {max(tracked.files.glob('run-*'), default=tracked.files)}"

    offline_modes = {"offline": "offline", "local": "local"}
    run, place, is_online = _opened(tracked, "SWANLAB_MODE", offline_modes, opened, command)
    return SwanLab(run, str(getattr(run, "url", None) or "SwanLab") if is_online else place)


_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


def trackio(tracked: TrackedRun) -> Service:
    """The run in Trackio: local files, or the Space or server that its own environment variables
    name. Trackio knows a run by its name, which therefore ends in a part of the id."""
    if tracked.is_offline:
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
    import trackio as package

    project = tracked.project_or(os.environ.get("TRACKIO_PROJECT"))
    run = package.init(
        project,
        name=f"{tracked.name}-{tracked.id[:6]}",
        resume="allow",
        config=dict(tracked.config),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    space = next((os.environ[name] for name in _ELSEWHERE if os.environ.get(name)), None)
    shown = f"`trackio show --project {project}` shows it"
    return Service(run, f"{space}" if space else f"on this machine; {shown}")


_MOST_PARAMS, _LONGEST_PARAM = 100, 500  # of one request; what every version and server accepts
_LONGEST_NAME = 250  # characters; mlflow/utils/validation.py has what a name may contain


@dataclass
class MLflow(Service):
    """One run, whose id is MLflow's; ``run`` is the client."""

    run_id: str

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step, in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = scalars(record).items()
        metrics = [Metric(_mlflow_name(name), value, now, step) for name, value in values]
        self.run.log_batch(self.run_id, metrics=metrics)

    def finish(self, outcome: str, facts: Facts) -> None:
        """Set the status."""
        status = {"complete": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED")
        self.run.set_terminated(self.run_id, status)


def _mlflow_name(name: str) -> str:
    """A name as MLflow takes it: ``pass@8`` is ``pass_8``. It refuses, with the whole request, also
    one that is another as a path, such as ``a//b``."""
    name = posixpath.normpath(name.replace("..", "_"))
    return re.sub(r"[^/\w.\- :]", "_", name)[:_LONGEST_NAME]


def mlflow(tracked: TrackedRun) -> MLflow:
    """The run of an earlier launch in MLflow, by its tag, or a new one with the recipe as
    parameters: on the server of ``MLFLOW_TRACKING_URI``, or in the current folder."""
    address, is_default = _address(tracked)
    if "://" not in address or address.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # of this process alone
    from mlflow import MlflowClient
    from mlflow.entities import Param

    client = MlflowClient(tracking_uri=address)
    name = tracked.project_or(os.environ.get("MLFLOW_EXPERIMENT_NAME"))
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    earlier = client.search_runs([number], f"tags.`surefoot.id` = '{tracked.id}'", max_results=1)
    if earlier:
        run_id = earlier[0].info.run_id
        client.update_run(run_id, status="RUNNING")
    else:
        tags = {"surefoot.id": tracked.id}
        run_id = client.create_run(number, tags=tags, run_name=tracked.name).info.run_id
        settings = flat(tracked.config).items()
        params = [Param(_mlflow_name(n), str(v)[:_LONGEST_PARAM]) for n, v in settings]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
    why = " (MLFLOW_TRACKING_URI is not set)" if is_default else ""
    return MLflow(client, f"experiment {name} of {redacted(address)}{why}", run_id)


def _address(tracked: TrackedRun) -> tuple[str, bool]:
    """The store, and whether nobody has named it. MLflow's own default is a database in the
    current folder; mlflow-skinny has no package for it, so there it is a folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri and not (tracked.is_offline and uri.startswith(("http", "databricks"))):
        return uri, False
    here = Path.cwd()
    if find_spec("sqlalchemy") and find_spec("alembic"):
        return f"sqlite:///{here / 'mlflow.db'}", True
    return (here / "mlruns").as_uri(), True


def flat(config: Facts, before: str = "") -> dict[str, object]:
    """The settings of a recipe by their dotted paths."""
    settings: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{before}{name}.")
        else:
            settings[f"{before}{name}"] = value
    return settings
