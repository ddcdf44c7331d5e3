"""MLflow: the server of ``MLFLOW_TRACKING_URI``, or a database in the current folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .redaction import redacted
from .tracker import Facts, TrackedRun, flat, ignored, scalars

_STATES = {"complete": "FINISHED", "stopped": "KILLED"}
_MOST_PARAMS, _LONGEST_PARAM = 100, 500  # of one request; what every version and server accepts


@dataclass
class MLflow:
    """One run, whose id is MLflow's."""

    client: Any
    run_id: str
    place: str
    event = ignored

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Scalars of a step, in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars(record).items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self, outcome: str, facts: Facts) -> None:
        """Set the status."""
        self.client.set_terminated(self.run_id, _STATES.get(outcome, "FAILED"))


def open_run(tracked: TrackedRun) -> MLflow:
    """Open the run of an earlier launch by its tag, or create one with the recipe as parameters."""
    address, is_default = _address(tracked)
    if "://" not in address or address.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # of this process alone
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=address)
    name = tracked.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "surefoot"
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    known = client.search_runs([experiment], f"tags.`surefoot.id` = '{tracked.id}'", max_results=1)
    if known:
        run_id = known[0].info.run_id
        client.update_run(run_id, status="RUNNING")
    else:
        tags = {"surefoot.id": tracked.id}
        run_id = client.create_run(experiment, tags=tags, run_name=tracked.name).info.run_id
        for params in _params(tracked.config):
            client.log_batch(run_id, params=params)
    why = " (MLFLOW_TRACKING_URI is not set)" if is_default else ""
    return MLflow(client, run_id, f"experiment {name} of {redacted(address)}{why}")


def _address(tracked: TrackedRun) -> tuple[str, bool]:
    """The store, and whether nobody has named it. MLflow's own default is a database in the
    current folder; mlflow-skinny has no package for it, so there it is a folder."""
    named = os.environ.get("MLFLOW_TRACKING_URI")
    if named and not (tracked.is_offline and named.startswith(("http", "databricks"))):
        return named, False
    here = Path.cwd()
    if find_spec("sqlalchemy") and find_spec("alembic"):
        return f"sqlite:///{here / 'mlflow.db'}", True
    return (here / "mlruns").as_uri(), True


def _params(config: Facts) -> Iterator[list[Any]]:
    from mlflow.entities import Param

    settings = flat(config).items()
    params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in settings]
    for first in range(0, len(params), _MOST_PARAMS):
        yield params[first : first + _MOST_PARAMS]
