"""The part ``correct``: the tests marked ``gpu``, each a case of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import results
from results import Results

FOLDER = Path(__file__).parent
PART = "correct"
STATUS = {"passed": "ok", "skipped": "skipped", "failed": "failed", "started": "timeout"}


def marked(tests: Path) -> list[str]:
    """The files below ``tests`` that mark some test ``gpu``, wherever they are."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def command(files: Sequence[str]) -> list[str]:
    """Pytest with its plugin. Warnings of other versions than the developers' are no failures."""
    options = ["-p", "outcomes", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default", "-q"]
    options += ["--continue-on-collection-errors"]
    return [sys.executable, "-m", "pytest", *options, *files]


def environment(folder: Path, stored: Results, seconds: float) -> dict[str, str]:
    """What the plugin reads: the tests that stand, those to run last, and the deadline."""
    found = results.latest(of_this_device(stored))
    names = {status: [] for status in (*STATUS.values(), "out of memory")}
    for (_, name, _), record in found.items():
        names[str(record["status"])].append(name)
    done = {"done": names["ok"], "late": [*names["failed"], *names["timeout"]]}
    (folder / "done.json").write_text(json.dumps(done))
    outcomes = folder / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    return {
        "SUREFOOT_OUTCOMES": str(outcomes),
        "SUREFOOT_DONE": str(folder / "done.json"),
        "SUREFOOT_DEADLINE": str(time.monotonic() + seconds),
        "PYTHONPATH": path,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever else that machine has
    }


def of_this_device(stored: Results) -> list[results.Record]:
    """The records of this part."""
    device = stored.surroundings["device"]
    return [r for r in stored.records if r["part"] == PART and r["device"] == device]


def collect(folder: Path, stored: Results) -> dict[str, int]:
    """Append a record for each test that was started; returns how many ended in which way.
    A test with several failures, as in its call and its end, has the first one."""
    ended: dict[str, Mapping[str, object]] = {}
    for line in results.read(folder / "outcomes.jsonl"):
        name = str(line["test"])
        if ended.get(name, {}).get("outcome") in (None, "started", "passed"):
            ended[name] = line
    count: dict[str, int] = {}
    for name, line in ended.items():
        status = STATUS[str(line["outcome"])]
        count[status] = count.get(status, 0) + 1
        record = {"part": PART, "case": name, "subject": "pytest", "status": status}
        message = line["message"] if status != "ok" else ""
        stored.append({**record, "seconds": line["seconds"], "figures": {}, "error": message})
    return count
