"""Where the time of a run went: a ledger over all of its launches, from what they have recorded.

No torch, so that ``surefoot runs goodput`` starts at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..storage.files import parse_json
from ..training.callbacks.launches import NAME, Follower, last_heartbeat

# What each second of a run belongs to. The first three are one clock of the loop, divided by
# whether the steps are in the run's latest state.
PARTS = {
    "trained": "steps that are part of the run, and their rollouts",
    "repeated": "steps that a later launch or a rollback has repeated",
    "saving": "training waited for saves",
    "evaluating": "evaluations",
    "callbacks": "callbacks: logs, trackers, responses to evaluation rows",
    "data": "training waited for data",
    "starting": "from the start of the process to the first step: imports, model, data",
    "ending": "after the last step: the results, the last upload",
    "down": "from the last sign of life of a launch to the next launch",
    "unrecorded": "not recorded: launches of earlier versions, or a suspended machine",
}
Row = Mapping[str, Any]


@dataclass
class Ledger:
    """Seconds of a run by what they went to; they sum to ``wall``."""

    wall: float = 0.0  # from the first launch to the last sign of life
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_launches: int = 0
    num_repeated_steps: int = 0
    step: int = 0  # that the run has reached
    # Stretches of training that no later launch has repeated: first step, last step, seconds.
    _stretches: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """The share of the time in which the run has made progress that it kept."""
        return self.seconds["trained"] / self.wall if self.wall else 0.0

    def as_data(self) -> dict[str, Any]:
        """All figures, as plain data."""
        figures = {n: v for n, v in asdict(self).items() if not n.startswith("_")}
        return {**figures, "goodput": self.goodput}

    def _resume(self, step: int) -> None:
        """The run is at ``step`` again: later steps, and a step that was begun, are repeated."""
        while self._stretches and self._stretches[-1][1] >= step:
            first, last, seconds = self._stretches[-1]
            if first < last == step:
                break
            self._stretches.pop()
            share = (step - first) / (last - first) if first < step else 0.0
            self.seconds["repeated"] += (1 - share) * seconds
            self.num_repeated_steps += last - max(first, step)
            if share:
                self._stretches.append((first, step, share * seconds))
        self.step = step

    def _train(self, step: int, seconds: float, *, is_interrupted: bool) -> None:
        """The loop has trained for ``seconds`` until ``step``, and was then interrupted or not."""
        if step < self.step:  # a rollback
            self.seconds["repeated"] += seconds
            self._resume(step)
        elif step == self.step and self._stretches and not is_interrupted:
            first, last, before = self._stretches[-1]
            self._stretches[-1] = first, last, before + seconds
        else:
            self._stretches.append((self.step, step, seconds))
            self.step = step

    def add(self, rows: list[Row], ended_before: float) -> float:
        """One launch: the record of its begin, and what followed; returns when it was last heard
        of. The launch before was, at ``ended_before``."""
        launch, ended, before = rows[0], float(rows[-1]["time"]), dict[str, float]()
        began = float(launch.get("began", launch["time"]))
        start = re.search(r"(\d+)$", launch.get("resumed_from") or "0")
        self._resume(int(start[1]) if start else self.step)
        for row in rows[1:]:
            if "seconds" not in row:  # what a watchdog, or an earlier version, says of the end
                continue
            now = row["seconds"]
            if "training" in now:
                trained = now["training"] - before.get("training", 0.0)
                is_interrupted = row["event"] == "heartbeat" or row.get("outcome") == "failed"
                self._train(row["step"], trained, is_interrupted=is_interrupted)
            before = now
        spent = {name: seconds for name, seconds in before.items() if name != "training"}
        if (overlap := ended_before - began) > 0:  # it has waited for the last save of that one
            spent["starting"] = spent.get("starting", 0.0) - overlap
            began = ended_before
        elif self.num_launches:
            self.seconds["down"] -= overlap
        for name, seconds in spent.items():
            self.seconds[name] += seconds
        self.seconds["unrecorded"] += (
            ended - began - sum(spent.values()) - before.get("training", 0.0)
        )
        self.num_launches += 1
        return ended


def ledger_of(folder: Path) -> Ledger:
    """The ledger of the run in ``folder``, to the last sign of life if it still trains. Raises
    ``RunError``."""
    try:
        rows = [parse_json(line) for line in Follower(folder / NAME).read()[0]]
        ledger = _ledger_of(rows, last_heartbeat(folder))
        if not math.isfinite(sum(ledger.seconds.values())):
            raise ValueError("a time is not finite")
        return ledger
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(f"{folder / NAME}: is no record of launches ({error})") from error


def _ledger_of(rows: list[Row], beat: Row) -> Ledger:
    launches: list[list[Row]] = []
    for row in [*rows, {**beat, "event": "heartbeat"}]:
        if row["event"] == "launch":
            launches.append([row])
        elif launches and row["event"] != "start":
            first, last = launches[-1][0], launches[-1][-1]
            # The last heartbeat of a launch that was killed is recorded by the next one; and one
            # from before the last log would look like a rollback.
            is_other = row["event"] == "heartbeat" and (
                row.get("began") != first.get("began") or row.get("time", 0) < last["time"]
            )
            if not is_other and last["event"] != "end":
                launches[-1].append(row)
    ledger, ended = Ledger(), 0.0
    for launch in launches:
        ended = ledger.add(launch, ended)
    if launches:
        first = launches[0][0]
        ledger.wall = ended - float(first.get("began", first["time"]))
    ledger.seconds["trained"] = sum(seconds for *_, seconds in ledger._stretches)
    return ledger
