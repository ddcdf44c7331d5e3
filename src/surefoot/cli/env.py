"""``surefoot env``: what a bug report needs, and whether all that is installed also loads."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click

from .. import __version__
from ..checkpoint.converting.targets import TARGETS
from ..checkpoint.layouts import LAYOUTS
from ..extensions import installed, problems
from ..methods import METHODS
from ..optim import OPTIMIZERS
from ..stages import STAGES
from ..storage.cgroups import usable_cores
from .main import COMMANDS
from .table import JSON, console, print_json, table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def env(as_json: bool) -> None:
    """Report versions, devices, memory and disk, whether every package loads, and what a recipe
    with default settings uses on this machine."""
    report = describe_environment()
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, facts in report.items():
        width = max(14, *map(len, facts))
        click.secho(title, bold=True)
        for name, value in facts.items():
            text = "; ".join(value) or "cpu only" if isinstance(value, list) else str(value)
            click.secho(f"  {name:<{width}} {text}", fg="red" if "does not load" in text else None)


@click.command()
@JSON
def plugins(as_json: bool) -> None:
    """List the plugins: what each adds, which package it comes from, and why something is missing.

    A package adds a plugin by an entry point of the group surefoot.plugins. The documentation has a
    page for it: docs/how-to/your-own-stage.md.
    """
    built_in: dict[str, Collection[str]] = {"commands": COMMANDS, "layouts": LAYOUTS.own}
    built_in |= {"stages": STAGES.own, "methods": METHODS.own, "optimizers": OPTIMIZERS.own}
    missing = problems({**built_in, "targets": TARGETS.own})
    rows: list[tuple[str | None, ...]] = []
    for each in installed():
        rows += [(each.name, each.source, "", "", each.problem)] if each.problem else []
        for kind, names in each.plugin.lists().items():
            keys = [(each.name, kind, name) for name in names]
            rows += [(each.name, each.source, *key[1:], missing.get(key)) for key in keys]
    columns = ("plugin", "from", "list", "name", "problem")
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    rich_table = table(*columns)
    for row in rows:
        rich_table.add_row(*(cell or "" for cell in row))
    console().print(rich_table)


# distribution -> what to import of it
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers.modeling_utils",  # the package itself imports next to nothing
    "peft": "peft",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "datasets": "datasets",
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "matplotlib": "matplotlib.pyplot",
    "xxhash": "xxhash",
}
# torchvision and torchaudio are not ours, but transformers imports them where it finds them
OPTIONAL = {
    "tensorboard": "tensorboard.summary",
    "flash-attn": "flash_attn",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
}
TIMEOUT = 300  # seconds; a first import of torch from a network disk takes minutes
GIB = 2**30

# Pieces of code, each of which leaves what it finds out in ``found``.
TORCH = """
import torch
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = [f"{c.name}, {c.total_memory / 2**30:.1f} GiB, sm_{c.major}{c.minor}" for c in cards]
found = {
    "build": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": names,
    "bf16": bool(cards) and torch.cuda.is_bf16_supported(),
    "threads": torch.get_num_threads(),
}
"""

CHOICES = """
from surefoot.run.policy import used_here
found = used_here()
"""

SAY = """
import json, os
def say(name, found):
    os.write(1, (json.dumps([name, found]) + chr(10)).encode())
"""

Facts = Mapping[str, object]
_TORCH, _CHOICES = "facts of torch", "choices"


@dataclass(frozen=True)
class ProbeResult:
    """What a piece of code found out, or why it failed."""

    found: object = None
    error: str = ""


def describe_environment() -> dict[str, Facts]:
    """The whole report, by title."""
    versions = {name: _version(name) for name in [*PACKAGES, *OPTIONAL]}
    imports = {name: _import(name) for name, version in versions.items() if version}
    # One process for all of them: one each took 11.9 CPU seconds, all in one take 5.4.
    results = probe_all({**imports, _TORCH: TORCH, _CHOICES: CHOICES})
    states = {name: _state(version, results.get(name)) for name, version in versions.items()}
    return {
        "surefoot": {
            "version": __version__,
            "folder": str(Path(__file__).parents[1]),
            "python": f"{platform.python_version()} at {sys.executable}",
        },
        "machine": machine(),
        "torch": torch_facts(results[_TORCH]),
        "used here": choice_facts(results[_CHOICES]),
        "packages": {name: states[name] for name in PACKAGES},
        "optional": {name: states[name] for name in OPTIONAL},
    }


def machine() -> Facts:
    """System, processor, memory and disk."""
    import psutil

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    usable = usable_cores()
    limit = "" if usable == os.cpu_count() else f", of which this process may use {usable}"
    return {
        "system": platform.platform(),
        "processors": f"{os.cpu_count()} ({processor()}){limit}",
        "memory": f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB",
        "disk": f"{disk.free / GIB:.1f} GiB free of {disk.total / GIB:.1f} GiB in {Path.cwd()}",
    }


def processor() -> str:
    """The name of the processor, or its kind. Speed and bits depend on it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def torch_facts(result: ProbeResult) -> Facts:
    """Torch's build and devices, or why it cannot be imported."""
    if result.error:
        return {"build": f"does not load: {result.error}"}
    return cast("Facts", result.found)


def choice_facts(result: ProbeResult) -> Facts:
    """What a recipe with default settings uses on this machine, and why."""
    return {"not known": result.error} if result.error else cast("Facts", result.found)


def probe_all(codes: Mapping[str, str]) -> dict[str, ProbeResult]:
    """What each piece of code finds out. One process runs all of them, as they share most of the
    time; those that it does not reach get one each.

    Packages are imported, and in another process than this: a version number says nothing about a
    compiled part that was built against another torch, and a crash there must not end the report.
    """
    reached, _ = _run(codes)
    rest = [name for name in codes if name not in reached]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        alone = dict(zip(rest, pool.map(lambda name: _run({name: codes[name]}), rest), strict=True))
    failed = {
        name: ProbeResult(findings.get(name), "" if name in findings else error)
        for name, (findings, error) in alone.items()
    }
    return {name: failed.get(name) or ProbeResult(reached[name]) for name in codes}


def _run(codes: Mapping[str, str]) -> tuple[dict[str, object], str]:
    """What each piece of code found that a process ran to its end, and why it ended early."""
    pieces = [f"found = None\n{code}\nsay({name!r}, found)" for name, code in codes.items()]
    output, error = probe("\n".join([SAY, *pieces]))
    return dict(filter(None, map(_said, output.splitlines()))), error or "it printed nothing"


def _said(line: str) -> tuple[str, object] | None:
    """The name and the value in a line that ``say`` printed; packages may print others."""
    try:
        name, finding = json.loads(line)
    except (TypeError, ValueError):
        return None
    return str(name), finding


def _state(version: str | None, result: ProbeResult | None) -> str:
    """The version of a package, and whether it can be imported."""
    if version is None or result is None:
        return "not installed"
    return f"{version}, does not load: {result.error}" if result.error else version


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import(name: str) -> str:
    return f"import {({**PACKAGES, **OPTIONAL})[name]}"


def probe(code: str) -> tuple[str, str]:
    """Run ``code`` in a new interpreter: its output, and its exit status if it failed."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or ""
        output = output.decode() if isinstance(output, bytes) else output
        return output, f"nothing after {TIMEOUT} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return done.stdout, lines[-1]
    return done.stdout, ""
