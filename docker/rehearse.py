"""Run the steps of the Dockerfile without a container engine: ``python docker/rehearse.py FOLDER``.

Each path of the image is a path below FOLDER. Steps for which an image is needed (packages of the
system, users) are skipped, and listed. ``--build-arg NAME=VALUE`` is as that of ``docker build``.
``--dry-run`` only prints the steps, ``--no-deps`` installs the package without the packages that it
needs.
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
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
OF_AN_IMAGE = ("apt-get", "useradd")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])((?:[^{}]|\{[^{}]*\})*))?\}|\{)")
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


def run(
    folder: Path,
    *,
    is_dry: bool,
    build_args: Mapping[str, str] = MappingProxyType({}),
    pip: str = "",
) -> list[str]:
    """Run the steps of the image in ``folder``; the steps that were skipped."""
    instructions = list(steps((ROOT / "Dockerfile").read_text()))
    outside = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    outside |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    device = _checked(build_args, instructions).get("DEVICE", "cpu")
    images: dict[str, dict[str, str]] = {}  # the ENV of each stage, which those upon it inherit
    arguments: dict[str, dict[str, str]] = {"": {}}  # of each stage; those above all, for FROM
    place, skipped = folder, []
    for step in instructions:
        if step.stage not in ("", "wheel", device, "surefoot"):
            continue
        own, image = arguments.get(step.stage, {}), images.get(step.stage, {})
        known = outside | own | image
        text = below(step.text, folder).replace("pip install", f"pip install {pip}".rstrip())
        if step.kind == "FROM":
            base = _filled(text.split()[0], arguments[""])
            images[step.stage], arguments[step.stage] = dict(images.get(base, {})), {}
        elif step.kind == "WORKDIR":
            place = Path(text)
            if not is_dry:
                place.mkdir(parents=True, exist_ok=True)
        elif step.kind == "ENV":
            image |= {name: _filled(value, known) for name, value in _pairs(text)}
        elif step.kind == "ARG":
            given = {name: build_args[name] for name, _ in _pairs(text) if name in build_args}
            defaults = {n: _filled(v, known) for n, v in _pairs(text) if v is not None}
            own |= defaults | given
        elif step.kind == "COPY" and not is_dry:
            _copy(text, place)
        elif step.kind == "RUN" and any(word in text for word in OF_AN_IMAGE):
            skipped.append(step.text)
        elif step.kind == "RUN":
            sys.stdout.write(f"$ {text}\n")
            if not is_dry:
                subprocess.run(["/bin/sh", "-ec", text], cwd=place, env=known, check=True)
    return skipped


def _checked(build_args: Mapping[str, str], instructions: list[Step]) -> Mapping[str, str]:
    names = {n for step in instructions if step.kind == "ARG" for n, _ in _pairs(step.text)}
    for name in build_args:
        if name not in names:
            known = ", ".join(sorted(names))
            raise SystemExit(f"--build-arg {name}: the Dockerfile has {known}, but no such ARG")
    stages = {step.stage for step in instructions if step.kind == "FROM"}
    if (device := build_args.get("DEVICE", "cpu")) not in stages:
        raise SystemExit(f"--build-arg DEVICE: the Dockerfile has no stage {device!r}")
    return build_args


def _pairs(text: str) -> Iterator[tuple[str, str | None]]:
    for word in shlex.split(text):
        name, is_given, value = word.partition("=")
        yield name, value if is_given else None


def _filled(value: str | None, known: Mapping[str, str]) -> str:
    """``value`` with its variables as a Dockerfile has them: an empty one is as one not set."""

    def of(found: re.Match[str]) -> str:
        name, sign, word = found[1] or found[2], found[3], found[4]
        if name is None:
            raise SystemExit(f"{value}: only $NAME, ${{NAME}}, ${{NAME:-word}} and ${{NAME:+word}}")
        if sign and bool(known.get(name)) == (sign == "+"):
            return _filled(word, known)
        return "" if sign == "+" else known.get(name, "")

    return VARIABLE.sub(of, value or "")


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
    """Rehearse the image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-deps", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    build_args = {}
    for word in given.build_arg:
        name, is_given, build_args[name] = word.partition("=")
        if not is_given:
            parser.error(f"--build-arg: expected NAME=VALUE, got {word}")
    pip = "--no-deps" if given.no_deps else ""
    for text in run(folder, is_dry=given.dry_run, build_args=build_args, pip=pip):
        sys.stdout.write(f"skipped, needs an image: {text}\n")


if __name__ == "__main__":
    main()
