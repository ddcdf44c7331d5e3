"""``/metrics`` of the board: the table of runs in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from ..board import Board
from ..run_folders import find_runs
from ..run_summary import last_rows

TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "complete", "stopped", "failed", "died", "ended", "unknown")
Row = Mapping[str, object]
Labels = Mapping[str, str]
_LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Gauge:
    """A figure of the board's table."""

    name: str
    help: str
    key: str  # of the row


GAUGES = (
    Gauge("step", "Optimizer steps so far.", "step"),
    Gauge("max_steps", "Optimizer steps of the whole run.", "max_steps"),
    Gauge("loss", "Mean loss since the last log.", "loss"),
    Gauge("learning_rate", "Learning rate of the last step that was logged.", "learning_rate"),
    Gauge("grad_norm", "Norm of the gradient before clipping.", "grad_norm"),
    Gauge("tokens_per_second", "Tokens read per second of training.", "speed"),
    Gauge(
        "seconds_left", "Seconds until the last step, by the speed of this launch.", "seconds_left"
    ),
    Gauge(
        "silent_seconds",
        "Seconds since the last sign of life of the last launch.",
        "silent_seconds",
    ),
    Gauge("size_bytes", "Bytes of the folder on the disk.", "size"),
)


def routes(board: Board) -> APIRouter:
    """The address that Prometheus reads."""
    router = APIRouter()
    router.get("/metrics")(_metrics(board))
    return router


def _metrics(board: Board) -> Callable[..., object]:
    def metrics() -> PlainTextResponse:
        """All runs below ROOT."""
        rows: list[Row] = []
        for folder in find_runs(board.root).folders:
            if folder.exists():
                train, _, _ = last_rows(folder)
                found = {name: train.get(name) for name in ("learning_rate", "grad_norm")}
                rows.append({**board.summaries.of(folder), **found})
        return PlainTextResponse(exposition(rows), media_type=TYPE)

    return metrics


def exposition(rows: Sequence[Row]) -> str:
    """The text of ``rows`` of the board's table."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    counts = Counter(str(row["state"]) for row in rows)
    yield from _head("surefoot_runs", "Runs by state.")
    for state in sorted({*STATES, *counts}):
        yield _sample("surefoot_runs", {"state": state}, counts[state])
    yield from _head("surefoot_run_info", "A run: its state, model, stage and method.")
    for row in rows:
        names = ("state", "model", "stage", "method")
        labels = {name: str(row.get(name) or "") for name in names}
        yield _sample("surefoot_run_info", {"run": str(row["run"]), **labels}, 1)
    for gauge in GAUGES:
        values = [(str(row["run"]), row.get(gauge.key)) for row in rows]
        yield from _family(f"surefoot_run_{gauge.name}", gauge.help, values)
    yield from _head("surefoot_run_metric", "The metric by which the best checkpoint is chosen.")
    for row in rows:
        metric = row.get("metric")
        if isinstance(metric, Mapping) and isinstance(metric.get("value"), int | float):
            labels = {"run": str(row["run"]), "metric": str(metric["name"])}
            yield _sample("surefoot_run_metric", labels, metric["value"])


def _family(name: str, text: str, values: Sequence[tuple[str, object]]) -> Iterator[str]:
    yield from _head(name, text)
    for run, value in values:
        if isinstance(value, int | float):
            yield _sample(name, {"run": run}, value)


def _head(name: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"


def _sample(name: str, labels: Labels, value: float) -> str:
    """One line. A name that is no Unicode, as file systems allow, gets a replacement character."""
    pairs = ",".join(f'{label}="{text.translate(_LABEL)}"' for label, text in labels.items())
    line = f"{name}{{{pairs}}} {value}"
    return line.encode("utf-8", "replace").decode()
