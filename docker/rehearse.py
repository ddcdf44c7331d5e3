"""Run the steps of the Dockerfile without a container engine: ``python docker/rehearse.py FOLDER``.

Each path of the image is a path below FOLDER. Steps for which an image is needed (packages of the
system, users) are skipped, and listed. ``--dry-run`` only prints the steps, ``--no-deps`` installs
the package without the packages that it needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_AN_IMAGE = ("apt-get", "useradd")
PLACES = ("/opt", "/wheels", "/src", "/cache", "/work")


@dataclass(frozen=True)
class Step:
    """One instruction: ``RUN pip install x``; its stage."""

    stage: str
    kind: str
    text: str


def steps(dockerfile: str) -> Iterator[Step]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    stage = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        kind, _, text = line.strip().partition(" ")
        if not kind:
            continue
        if kind == "FROM":
            stage = text.split()[-1]
        yield Step(stage, kind, " ".join(text.split()))


def below(text: str, folder: Path) -> str:
    """``text`` with the places of the image below ``folder``."""
    return re.sub(rf"(?<![\w.:/])({'|'.join(PLACES)})(?![\w])", rf"{folder}\1", text)


def run(folder: Path, wanted: tuple[str, ...], *, is_dry: bool, pip: str = "") -> list[str]:
    """Run the steps of these stages in ``folder``; the steps that were skipped."""
    known = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    known |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    place, skipped = folder, []
    for step in steps((ROOT / "Dockerfile").read_text()):
        if step.stage not in wanted:
            continue
        text = below(step.text, folder).replace("pip install", f"pip install {pip}".rstrip())
        if step.kind == "WORKDIR":
            place = Path(text)
            if not is_dry:
                place.mkdir(parents=True, exist_ok=True)
        elif step.kind in ("ENV", "ARG"):
            known |= {name: _filled(value, known) for name, value in _pairs(text)}
        elif step.kind == "COPY" and not is_dry:
            _copy(text, place)
        elif step.kind == "RUN" and any(word in text for word in OF_AN_IMAGE):
            skipped.append(step.text)
        elif step.kind == "RUN":
            sys.stdout.write(f"$ {text}\n")
            if not is_dry:
                subprocess.run(["/bin/sh", "-ec", text], cwd=place, env=known, check=True)
    return skipped


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        yield name, value


def _filled(value: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], ""), value)


def _copy(text: str, place: Path) -> None:
    if text.startswith("--from="):
        return  # stages share the folder
    *sources, target = text.split()
    into = place / target
    for source in sources:
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, into, dirs_exist_ok=True)
            continue
        is_folder = target.endswith(("/", "."))
        (into if is_folder else into.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, into)


def main() -> None:
    """Rehearse the image for a CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-deps", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    pip = "--no-deps" if given.no_deps else ""
    for text in run(folder, ("wheel", "cpu", "surefoot"), is_dry=given.dry_run, pip=pip):
        sys.stdout.write(f"skipped, needs an image: {text}\n")


if __name__ == "__main__":
    main()
