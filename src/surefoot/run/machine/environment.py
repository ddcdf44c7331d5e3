"""What a bug report needs, and whether everything that is installed also loads.

Every package is imported in another process: a version number says nothing about a compiled part
that was built against another torch, and a crash there must not end the report.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ... import __version__

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

TORCH = """
import json, sys, torch
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = [f"{c.name}, {c.total_memory / 2**30:.1f} GiB, sm_{c.major}{c.minor}" for c in cards]
sys.stdout.write(json.dumps({
    "build": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": names,
    "bf16": bool(cards) and torch.cuda.is_bf16_supported(),
    "threads": torch.get_num_threads(),
}))
"""

CHOICES = """
import json, sys
from surefoot.run.machine.device_choices import here
sys.stdout.write(json.dumps(here()))
"""

Facts = Mapping[str, object]


def describe_environment() -> dict[str, Facts]:
    """The whole report, by title."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        said, chosen = pool.submit(probe, TORCH), pool.submit(probe, CHOICES)
        states = _states(pool, [*PACKAGES, *OPTIONAL])
    return {
        "surefoot": {
            "version": __version__,
            "folder": str(Path(__file__).parent.parent),
            "python": f"{platform.python_version()} at {sys.executable}",
        },
        "machine": machine(),
        "torch": torch_facts(*said.result()),
        "used here": choice_facts(*chosen.result()),
        "packages": {name: states[name] for name in PACKAGES},
        "optional": {name: states[name] for name in OPTIONAL},
    }


def machine() -> Facts:
    """System, processor, memory and disk."""
    import psutil

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    return {
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "memory": f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB",
        "disk": f"{disk.free / GIB:.1f} GiB free of {disk.total / GIB:.1f} GiB in {Path.cwd()}",
    }


def torch_facts(output: str, error: str) -> Facts:
    """Torch's build and devices, or why it cannot be imported."""
    return {"build": f"does not load: {error}"} if error else dict(json.loads(output))


def choice_facts(output: str, error: str) -> Facts:
    """What a recipe with default settings uses on this machine, and why."""
    return {"not known": error} if error else dict(json.loads(output))


def _states(pool: ThreadPoolExecutor, names: Sequence[str]) -> dict[str, str]:
    """The version of each package, and whether it can be imported. One process imports all of them,
    as they share most of the time; those that it does not reach get one each."""
    known = {name: version for name in names if (version := _version(name))}
    said = "import os; os.write(1, {!r})"
    code = [f"{_import(name)}; {said.format((name + chr(10)).encode())}" for name in known]
    loaded = probe("\n".join(code))[0].splitlines()
    rest = [name for name in known if name not in loaded]
    errors = dict(zip(rest, pool.map(lambda name: probe(_import(name))[1], rest), strict=True))
    failed = {name: f"{known[name]}, does not load: {e}" for name, e in errors.items() if e}
    return {name: failed.get(name) or known.get(name, "not installed") for name in names}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import(name: str) -> str:
    return f"import {({**PACKAGES, **OPTIONAL})[name]}"


def probe(code: str) -> tuple[str, str]:
    """Run ``code`` in a new interpreter: its output, and its exit status if it failed."""
    command = [sys.executable, "-W", "ignore", "-c", code]
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
