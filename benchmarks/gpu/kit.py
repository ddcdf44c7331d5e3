"""Prove and measure everything on one GPU, in parts that each end within their minutes.

    make gpu                       # all parts, and the page
    make gpu PART=correct          # or suite, speed, save, profile
    make gpu PART="correct profile"
    .venv/bin/python benchmarks/gpu/kit.py speed --out runs/gpu --minutes 8

A part runs its cases in order, the most telling first. It starts no case that would not fit into
its minutes, and skips those whose result is known already, from ``results.jsonl`` in ``--out`` or
``--known``. So the same command continues where the last one stopped; cases that failed come last.
Results and ``page.md`` are written as each case ends. ``--tiny --device cpu`` tries everything
without a GPU. ``page`` writes the tables into RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cases
import correct
import page
import results
from cases import Case
from results import Results
from sizes import FORMULA, SHAPES

ROOT = results.ROOT
PARTS = ("correct", "suite", "speed", "save", "profile")
PREPARING = {"8B": 75, "1.7B": 30}  # seconds to make a model; other models and rows take FEW
FEW = 20
WORK = ROOT / "runs" / "gpu-work"
PATIENCE = 3  # times its seconds is the most that a case may take
NAME_OF_DEVICE = "import torch; print(torch.cuda.get_device_name())"
# A program must not stay on the GPU when the kit is killed: Linux then kills it, too
BOUND = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")

Run = Callable[[Sequence[str], Mapping[str, str], Path, Path, float], int | None]


def run_program(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, seconds: float
) -> int | None:
    """The exit code of a program, its output in ``log``; None if it was killed, with all that it
    had started, because its time was over."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*BOUND, *command],
            env=env,
            cwd=cwd,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=max(0.1, seconds))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


@dataclass
class Kit:
    """Where everything is, and how much time is left."""

    out: Path
    work: Path
    device: str
    minutes: float
    tiny: bool
    tests: Path
    run: Run = run_program
    known: Sequence[Path] = ()  # folders of earlier results
    end: float = float("inf")  # of all parts
    deadline: float = field(init=False)
    stored: Results = field(init=False)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        found = results.surroundings(self.device, self.device_name(), tiny=self.tiny)
        self.stored = Results(self.out / "results.jsonl", found)
        for folder in (*self.known, self.work):
            self.stored.adopt(folder / self.stored.path.name)
        for folder in (*self.known, self.out):  # another kit may be at work in a known one
            for part in correct.MARKS:
                correct.collect(
                    part, folder / correct.outcomes_of(part), self.stored, only_new=True
                )

    @property
    def left(self) -> float:
        """Seconds of this part that are left."""
        return self.deadline - time.monotonic()

    def device_name(self) -> str:
        """For people, and to keep results of several devices apart."""
        if self.device == "cpu":
            return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
        command = [sys.executable, "-c", NAME_OF_DEVICE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit("no GPU here; --device cpu --tiny tries everything without one")
        return done.stdout.strip()

    def part(self, name: str, only: str = "") -> None:
        """Run the cases of one part that have no result yet, as far as the time goes."""
        self.deadline = min(self.end, time.monotonic() + 60 * self.minutes)
        if name in correct.MARKS:
            self.pytest(name)
            self.publish()
            return
        found = cases.CASES[name]()
        found = cases.tiny(found) if self.tiny else found
        for case in sorted(found, key=lambda case: self.stored.has_failed(case.key)):
            if only in f"{case.name}, {case.subject}":
                try:
                    self.case(case)
                except (OSError, ValueError, KeyError) as error:  # it must not hide the others
                    self.store(
                        case, "failed", 0.0, error=f"the kit: {type(error).__name__}: {error}"
                    )
                self.publish()

    def publish(self) -> None:
        """The page of what is known so far, and a copy of the results for the next call on this
        machine, whose ``--out`` may be empty."""
        if self.stored.path.exists():
            shutil.copyfile(self.stored.path, self.work / self.stored.path.name)
        try:
            text = page.render(self.stored.records)
        except (KeyError, TypeError, ValueError) as error:  # the results are there all the same
            text = f"no page: {type(error).__name__}: {error}"
            say(text)
        (self.out / "page.md").write_text(text + "\n")

    def pytest(self, part: str) -> None:
        """The tests of ``correct`` or ``suite``. A test that hangs, or that ends the process or its
        GPU context, ends one round; the next round has the tests that are left."""
        files = correct.files_of(part, self.tests)
        if not files:
            raise SystemExit(f"{part}: no test in {self.tests} is marked gpu")
        outcomes, log = self.out / correct.outcomes_of(part), self.out / f"{part}.log"
        ended: set[str] = set()
        while True:
            env = correct.environment(part, outcomes, self.stored, self.left - 30, ended)
            command = correct.command(part, files)
            code = self.run(command, self.environment() | env, ROOT, log, self.left)
            found = correct.collect(part, outcomes, self.stored)
            outcomes.unlink()
            say(f"{part}: {dict(Counter(found.values()))}, pytest's exit code {code}")
            if correct.is_complete(code, found):
                return
            self.keep_log(part, log)
            if part == "suite" or not set(found) - ended or self.left < correct.ROUND:
                return
            ended |= set(found)

    def keep_log(self, title: str, log: Path) -> None:
        """Append the end of a program's output to a file that comes back with the results."""
        with (self.out / "failures.log").open("a", encoding="utf-8") as file:
            file.write(f"==== {title}\n{tail(log, lines=200, characters=20_000)}\n")

    def case(self, case: Case) -> None:
        """Run one case, unless its result stands, something is missing, or the time is short."""
        title = ", ".join(case.key)
        if self.stored.stands(case.key):
            say(f"{title}: stands")
            return
        missing = [name for name in case.needs if find_spec(name) is None]
        if "triton" in case.needs and self.device == "cpu":
            missing.append("CUDA")
        if missing:
            if self.stored.status(case.key) != "unavailable":
                self.store(case, "unavailable", 0.0, error=f"without {', '.join(missing)}")
            return
        if self.left < case.seconds + self.preparing(case):
            say(f"{title}: left for the next run, {self.left:.0f} s left of this one")
            return
        say(f"{title} …")
        began = time.monotonic()
        failed = self.prepare(case)
        if failed:
            self.store(case, "failed", time.monotonic() - began, error=failed)
            return
        self.measure(case)

    def measure(self, case: Case) -> None:
        """Run the program of a case and store what came of it."""
        began, report, log = time.monotonic(), self.work / "report.json", self.work / "log"
        report.unlink(missing_ok=True)
        shutil.rmtree(self.work / "run", ignore_errors=True)
        limit = self.left if self.tiny else min(self.left, PATIENCE * case.seconds)
        code = self.program(case.program, self.settings(case, report), log, limit)
        seconds = time.monotonic() - began
        figures = self.figures(case, report)
        for row in figures.pop("rows", []):
            self.stored.append({**row, "part": case.part, "settings": case.settings})
        if code == 0 and report.exists():
            self.store(case, "ok", seconds, figures=figures)
            return
        error = tail(log)
        self.keep_log(", ".join(case.key), log)
        status = "timeout" if code is None else "failed"
        if any(sign in error for sign in OUT_OF_MEMORY):
            status = "out of memory"
        self.store(case, status, seconds, error=error)

    def settings(self, case: Case, report: Path) -> dict[str, object]:
        """What the program reads."""
        found = {**case.settings, "report": str(report), "device": self.device}
        if case.shape:
            found |= {"model": str(self.model(case)), "inputs": str(self.rows(case))}
            found |= {"output": str(self.work / "run")}
        if case.part != "save" and case.shape:
            found["pad_token_id"] = 0
        if case.part == "save":
            found["output"] = str(self.work / "run")
        return found

    def figures(self, case: Case, report: Path) -> dict[str, Any]:
        """The report, if there is one, and the operations of a token where they can be counted."""
        if not report.exists():
            return {}
        found: dict[str, Any] = json.loads(report.read_text())
        lengths = self.rows(case) / "lengths.json"
        if case.part in ("speed", "profile") and case.shape and lengths.exists():
            length = json.loads(lengths.read_text())["weighted_mean"]
            method = str(case.settings["method"])
            found["operations"] = SHAPES[case.shape].operations(method, length)
            found["formula"] = FORMULA
        return found

    def model(self, case: Case) -> Path:
        """The folder of the model of a case."""
        return self.work / "models" / case.shape

    def rows(self, case: Case) -> Path:
        """The folder of the rows of a case."""
        return self.work / "rows" / case.rows

    def todo(self, case: Case) -> list[tuple[Path, dict[str, str]]]:
        """What is to be made before a case."""
        if not case.shape:
            return []
        wanted = [(self.model(case), {"shape": case.shape}), (self.rows(case), {"rows": case.rows})]
        return [(folder, task) for folder, task in wanted if not (folder / "ready").exists()]

    def preparing(self, case: Case) -> int:
        """Seconds that the model and the rows of a case may take."""
        if self.tiny:
            return 0
        return sum(PREPARING.get(task.get("shape", ""), FEW) for _, task in self.todo(case))

    def prepare(self, case: Case) -> str:
        """Make model and rows; returns what went wrong."""
        for folder, task in self.todo(case):
            settings = {**task, "target": str(folder), "device": self.device}
            log = self.work / "log"
            if self.program(results.FOLDER / "shapes.py", settings, log, self.left) != 0:
                return tail(log)
        return ""

    def program(
        self, program: Path, settings: Mapping[str, object], log: Path, seconds: float
    ) -> int | None:
        """Run one of the programs on its task."""
        task = self.work / "task.json"
        task.write_text(json.dumps(settings))
        command = [sys.executable, str(program), str(task)]
        return self.run(command, self.environment(), program.parent, log, seconds)

    def environment(self) -> dict[str, str]:
        """Environment variables of every program: caches of its own, no network."""
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        hidden = {} if self.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        return {
            **os.environ,
            **hidden,
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.work / "caches" / "huggingface"),
            "XDG_CACHE_HOME": str(self.work / "caches" / "xdg"),
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_DISABLED": "true",
        }

    def store(
        self,
        case: Case,
        status: str,
        seconds: float,
        *,
        figures: Mapping[str, object] | None = None,
        error: str = "",
    ) -> None:
        """Append the record of a case."""
        part, name, subject = case.key
        record = {"part": part, "case": name, "subject": subject, "status": status}
        more = {"seconds": round(seconds, 1), "settings": case.settings, "error": error}
        self.stored.append({**record, **more, "figures": figures or {}})
        say(f"{name}, {subject}: {status} after {seconds:.0f} s {error[-300:]}")


def tail(log: Path, lines: int = 25, characters: int = 3000) -> str:
    """The end of what a program printed."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])[-characters:]


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or page")
    found.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="of the results")
    found.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "gpu-work", help="of models, rows"
    )
    found.add_argument("--minutes", type=float, default=8.0, help="of each part")
    found.add_argument("--total", type=float, default=float("inf"), help="minutes of all parts")
    found.add_argument(
        "--known", type=Path, action="append", default=[], help="folder of earlier results"
    )
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="the same in sizes for a CPU")
    found.add_argument("--only", default="", help="cases whose `name, subject` contains this")
    found.add_argument("--tests", type=Path, default=ROOT / "tests")
    return found


def main(arguments: Sequence[str] | None = None, run: Run = run_program) -> None:
    """Run the parts, or write the page."""
    began, options = time.monotonic(), parser().parse_args(arguments)
    parts = options.parts or ["all"]
    if unknown := [part for part in parts if part not in (*PARTS, "all", "page")]:
        raise SystemExit(f"expected parts {', '.join(PARTS)}, all or page, got {unknown[0]!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its programs end with it
    if parts != ["page"]:
        kit = Kit(
            options.out.resolve(),
            options.work.resolve(),
            options.device,
            options.minutes,
            options.tiny,
            options.tests,
            run,
            (results.FOUND, *options.known),
            began + 60 * options.total,
        )
        for line in results.unmet():
            say(f"warning: {line}")
        for part in PARTS if "all" in parts else [part for part in parts if part != "page"]:
            kit.part(part, options.only)
    if {"all", "page"} & set(parts) and not options.tiny:
        page.write(results.read(options.out / "results.jsonl"))


if __name__ == "__main__":
    main()
