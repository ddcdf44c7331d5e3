"""The launches of a run, each with its surroundings: what bits depend on beside the recipe, the
base and the rows. A resume says what has changed of them; a replay computes in those of a step.

No torch: ``surefoot replay`` reads them before it is imported, and ``surefoot runs`` at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..storage.files import Hash, parse_json
from ..training.callbacks.launches import NAME, Follower, last_heartbeat

EVENT = "surroundings"  # of a line of launches.jsonl, once a launch has opened its data and model
_PACKAGE = Path(__file__).parent.parent
# What of the environment decides how products are computed, and in which order sums are.
VARIABLES = ("ATEN_", "CUBLAS_", "DNNL_", "KMP_", "MKL_", "NCCL_ALGO", "NVIDIA_TF32", "OMP_")
_PLAIN = {"code": "Surefoot's code", "data.training": "training rows"}
_GROUPS = ("versions.", "variables.", "settings.")  # whose names are plain without the group
_EVALUATION = "data.evaluation."


@dataclass(frozen=True)
class Launch:
    """One launch of a run, as far as it is recorded."""

    number: int  # from 1
    start: int  # the step after which it began
    facts: Mapping[str, Any]  # of its line: ranks, device, what it resumed from
    reached: int = 0  # the last step that is known of it
    surroundings: Mapping[str, Any] = field(default_factory=dict)  # empty: not recorded

    @property
    def ranks(self) -> int:
        """The ranks that trained."""
        return int(self.facts.get("ranks") or 1)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its values of the settings that may differ between launches, by their paths."""
        return dict(self.surroundings.get("settings", {}))


def launches_in(folder: Path) -> list[Launch]:
    """The launches of the run in ``folder``, in order."""
    launches: list[Launch] = []
    lines = (_row(line) for line in Follower(folder / NAME).read()[0])
    for row in (*lines, {**last_heartbeat(folder), "event": "heartbeat"}):
        event, step = row.get("event"), row.get("step")
        if event == "launch":
            start = re.search(r"(\d+)$", str(row.get("resumed_from") or 0))
            launches.append(Launch(len(launches) + 1, int(start[1]) if start else 0, row))
            continue
        if not launches or row.get("began", launches[-1].facts.get("began")) != launches[
            -1
        ].facts.get("began"):
            continue
        if event == EVENT:
            launches[-1] = replace(launches[-1], surroundings=row)
        elif isinstance(step, int):
            launches[-1] = replace(launches[-1], reached=max(step, launches[-1].reached))
    return launches


def _row(line: bytes) -> dict[str, Any]:
    with suppress(ValueError):  # a line that a power failure has cut
        row = parse_json(line)
        return row if isinstance(row, dict) else {}
    return {}


def launch_of(launches: Sequence[Launch], step: int) -> Launch | None:
    """The launch whose ``step`` is part of the run: the last one that computed it."""
    begun = [launch for launch in launches if launch.start < step]
    reached = [launch for launch in begun if launch.reached >= step]
    return next(reversed(reached or begun), None)


@cache
def hash_of_code() -> str:
    """A hash of Surefoot's own source. The version does not say it: a clone changes between two."""
    hashed = Hash()
    for file in sorted(_PACKAGE.rglob("*.py")):
        hashed.update(f"{file.relative_to(_PACKAGE)}\n".encode() + file.read_bytes())
    return hashed.hexdigest()[:12]


@dataclass(frozen=True)
class Difference:
    """What differs between the surroundings of two launches."""

    name: str  # such as "versions.torch"
    before: object  # None: it was not there
    now: object

    @property
    def is_of_evaluations(self) -> bool:
        """Whether training does not depend on it."""
        return self.name.startswith(_EVALUATION)

    @property
    def is_setting(self) -> bool:
        """Whether it is a setting of the recipe, of which a resume speaks by itself."""
        return self.name.startswith("settings.")

    def __str__(self) -> str:
        if self.is_of_evaluations:
            what = self.name.removeprefix(_EVALUATION)
            return f"evaluation rows{f' of {what}' if what else ''} changed"
        if self.name in _PLAIN:
            return f"{_PLAIN[self.name]} changed"
        name = self.name
        for group in _GROUPS:
            name = name.removeprefix(group)
        before, now = (_shown(value) for value in (self.before, self.now))
        return f"{name}: {before} -> {now}"


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What differs; nothing if one of them was not recorded."""
    if not before or not now:
        return []
    a, b = dict(_flat(before)), dict(_flat(now))
    return [Difference(n, a.get(n), b.get(n)) for n in {**a, **b} if a.get(n) != b.get(n)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if not prefix and name in ("event", "time", "start", "since", "changed", "verdict"):
            continue
        if isinstance(inner, Mapping) and prefix != "settings.":
            yield from _flat(inner, f"{path}.")
        else:
            yield path, inner


EQUAL = "equal to the bit"
ROUNDING = "equal up to rounding only"


def verdict(found: Sequence[Difference]) -> str:
    """What the steps of now are beside those of a run that was never stopped."""
    if any(not (each.is_setting or each.is_of_evaluations) for each in found):
        return ROUNDING
    return "with other settings" if any(each.is_setting for each in found) else EQUAL
