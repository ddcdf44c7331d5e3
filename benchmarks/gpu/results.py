"""Results as JSON lines: one record for each case that was run, with device, versions and commit.

A record is appended and flushed when its case ends, so that a kit that is stopped loses only the
case that runs. A torn last line is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "bitsandbytes")
STANDING = ("ok", "out of memory")  # a case with such a result is not run again
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FOUND = ROOT / "runs" / "gpu"  # where results of other machines are put, and known from
Record = dict[str, object]


@dataclass
class Results:
    """The records of one file, for one device."""

    path: Path
    surroundings: Mapping[str, object]
    records: list[Record] = field(init=False)

    def __post_init__(self) -> None:
        self.records = read(self.path)

    def stands(self, key: Sequence[str]) -> bool:
        """Whether a case has a result of this device that need not be measured again."""
        return self.status(key) in STANDING

    def has_failed(self, key: Sequence[str]) -> bool:
        """Whether a case was tried without a result."""
        return self.status(key) in ("failed", "timeout")

    def status(self, key: Sequence[str]) -> str:
        """The status of a case on this device with this code; empty if it has not been tried."""
        found = latest(self.own()).get(tuple(key))
        return str(found["status"]) if found else ""

    def own(self) -> list[Record]:
        """The records of this device and code: what other code has shown is shown no longer."""
        mine = [self.surroundings[name] for name in ("device", "code")]
        return [r for r in self.records if [r["device"], r.get("code")] == mine]

    def adopt(self, path: Path) -> None:
        """Add the records of another file that are not here yet."""
        if path.resolve() == self.path.resolve():
            return
        for record in read(path):
            if record not in self.records:
                self._write(record)

    def append(self, record: Mapping[str, object]) -> Record:
        """Add a record, with the surroundings, and flush it."""
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return self._write({**record, "date": date, **self.surroundings})

    def _write(self, full: Record) -> Record:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("a", encoding="utf-8") as file:
            if text and not text.endswith(b"\n"):
                file.write("\n")  # ends a torn line
            file.write(json.dumps(full) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(full)
        return full


def key_of(record: Mapping[str, object]) -> tuple[str, ...]:
    """What identifies a case: part, case and subject."""
    return str(record["part"]), str(record["case"]), str(record["subject"])


def read(path: Path) -> list[Record]:
    """The records of a file; lines that are not complete are skipped."""
    found: list[Record] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def latest(records: Sequence[Record]) -> dict[tuple[str, ...], Record]:
    """The latest record of every case; a failure does not replace an earlier result."""
    found: dict[tuple[str, ...], Record] = {}
    for record in records:
        key = key_of(record)
        if record["status"] in STANDING or found.get(key, record)["status"] not in STANDING:
            found[key] = record
    return found


def surroundings(device: str, name: str, *, tiny: bool) -> dict[str, object]:
    """What every record says about where it was measured. Tiny runs have a device of their own,
    so that they never stand for others."""
    return {
        "device": f"{name}, tiny" if tiny else name,
        "kind": device,
        "tiny": tiny,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit(),
        "code": code(),
    }


def code() -> str:
    """A hash of the package's source, also where there is no git."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def commit() -> str:
    """The commit of the tree, with a + if the tree differs. A copy without git is given its commit
    in ``SUREFOOT_COMMIT``."""
    if "SUREFOOT_COMMIT" in os.environ:
        return os.environ["SUREFOOT_COMMIT"]
    try:
        name = _git("rev-parse", "--short", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def unmet() -> list[str]:
    """What pyproject.toml requires and this environment lacks, or has in another version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for wanted in map(Requirement, project["dependencies"]):
        here = _version(wanted.name)
        if here is None or not wanted.specifier.contains(here, prereleases=True):
            found.append(f"pyproject.toml: {wanted}: found {here or 'none'}")
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
