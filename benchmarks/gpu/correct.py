"""The parts ``correct`` and ``suite``: the tests marked ``gpu``, each a case of its own; and all
that ``make test`` runs, on this device, whose failures are cases."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import results
from results import Results

FOLDER = Path(__file__).parent
MARKS = {"correct": "gpu", "suite": "not gpu and not proof"}  # of the tests of each part
ALL = "all tests"  # the case of ``suite`` that counts
COMPLETE = (0, 1, 5)  # exit codes of pytest when every test has run; 5: none was left; a test
# that hangs ends it with 1, too
ROUND = 45.0  # seconds without which no further round is started
STATUS = {"passed": "ok", "skipped": "skipped", "failed": "failed", "started": "timeout"}


def outcomes_of(part: str) -> str:
    """The file beside the results while tests run; it is left over if the kit is killed."""
    return f"{part}.jsonl"


def files_of(part: str, tests: Path) -> list[str]:
    """What pytest is given."""
    return marked(tests) if part == "correct" else [str(tests)]


def marked(tests: Path) -> list[str]:
    """The files below ``tests`` that mark some test ``gpu``, wherever they are."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def command(part: str, files: Sequence[str]) -> list[str]:
    """Pytest with its plugin. Warnings of other versions than the developers' are no failures.

    The tests marked ``gpu`` run one after another; the others share the device, a worker a core.
    """
    options = ["-p", "outcomes", "-p", "no:cacheprovider", "-m", MARKS[part], "-W", "default", "-q"]
    options += ["--continue-on-collection-errors"]
    if part == "suite" and find_spec("xdist"):
        options += ["-p", "xdist", "-n", str(len(os.sched_getaffinity(0)))]
    return [sys.executable, "-m", "pytest", *options, *files]


def environment(
    part: str, outcomes: Path, stored: Results, seconds: float, ended: Collection[str]
) -> dict[str, str]:
    """What the plugin reads: the tests that stand or have ``ended`` in an earlier round, those to
    run last, and the deadline."""
    found = results.latest([r for r in stored.own() if r["part"] == part])
    names = {status: [] for status in (*STATUS.values(), "out of memory")}
    for (_, name, _), record in found.items():
        names[str(record["status"])].append(name)
    done = {"done": [*names["ok"], *ended], "late": [*names["failed"], *names["timeout"]]}
    outcomes.write_text(json.dumps({**_place(stored), **done}) + "\n")
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    return {
        "SUREFOOT_OUTCOMES": str(outcomes),
        "SUREFOOT_DEADLINE": str(time.monotonic() + seconds),
        "PYTHONPATH": path,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever else that machine has
        "PYTEST_XDIST_WORKER": "",  # of a test of the kit; xdist sets it in its own workers
    }


def is_complete(code: int | None, found: Mapping[str, str]) -> bool:
    """Whether a round has run every test."""
    return code in COMPLETE and STATUS["started"] not in found.values()


def _place(stored: Results) -> dict[str, object]:
    """What outcomes belong to."""
    return {name: stored.surroundings[name] for name in ("device", "code")}


def collect(
    part: str, outcomes: Path, stored: Results, *, only_new: bool = False
) -> dict[str, str]:
    """Append a record for each test that was started, or ``only_new`` ones; returns their statuses.
    A test with several failures, as in its call and its end, has the first one. What another device
    or other code left is ignored.

    Of ``suite``, those have one that failed, now or in an earlier record; and ``ALL`` counts.
    """
    ended: dict[str, Mapping[str, object]] = {}
    head, *lines = results.read(outcomes) or [{}]
    is_of_this = {**head, **_place(stored)} == head
    for line in lines if is_of_this else ():
        name = str(line["test"])
        if ended.get(name, {}).get("outcome") in (None, "started", "passed"):
            ended[name] = line
    found = {name: STATUS[str(line["outcome"])] for name, line in ended.items()}
    known = {str(record["case"]) for record in stored.records if record["part"] == part}
    for name, line in ended.items():
        if only_new and stored.status((part, name, "pytest")):
            continue
        if part == "suite" and found[name] in ("ok", "skipped") and name not in known:
            continue
        record = {"part": part, "case": name, "subject": "pytest", "status": found[name]}
        message = line["message"] if found[name] != "ok" else ""
        stored.append({**record, "seconds": line["seconds"], "figures": {}, "error": message})
    if part == "suite" and found and not only_new:
        record = {"part": part, "case": ALL, "subject": "pytest", "status": "ok", "seconds": 0.0}
        stored.append({**record, "figures": dict(Counter(found.values())), "error": ""})
    return found
