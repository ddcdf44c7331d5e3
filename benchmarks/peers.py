"""The peers' virtual environment, made on first use, and the surroundings every subject runs in.

LLaMA-Factory's requirements cannot be met together with Surefoot's (it wants an older transformers,
datasets and peft), so it lives in ``benchmarks/.venv-peers``. As installed it does not start beside
a CPU build of torch: pip takes torchvision and torchaudio builds that are linked against another
torch, and every command, ``version`` too, dies with ``operator torchvision::nms does not exist``.
So both are removed, and as one module imports torchaudio unconditionally, an empty package of that
name takes its place. Neither is used for text; LLaMA-Factory starts faster for it, not slower.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from measure import say

FOLDER = Path(__file__).parent
PEERS = FOLDER / ".venv-peers"
REQUIREMENTS = FOLDER / "requirements.txt"
CONSTRAINTS = FOLDER / "constraints.txt"
PYTHON = PEERS / "bin" / "python"
LLAMAFACTORY = PEERS / "bin" / "llamafactory-cli"
SUREFOOT = Path(sysconfig.get_path("scripts")) / "surefoot"
BROKEN = ("torchvision", "torchaudio")
STUB = '"""Empty: stands in for a torchaudio that does not load beside this torch."""\n'


def ensure() -> None:
    """Make the peers' environment unless it is there and made from these requirements."""
    stamp = PEERS / "made-from"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"making {PEERS} (minutes, about 2 GB, once)")
    venv.create(PEERS, clear=True, with_pip=True)
    _pip("install", "--requirement", str(REQUIREMENTS), "--constraint", str(CONSTRAINTS))
    _pip("uninstall", "--yes", *BROKEN)
    _put_stub()
    subprocess.run([LLAMAFACTORY, "version"], check=True, stdout=subprocess.DEVNULL)
    stamp.write_text(wanted)


def versions(*names: str) -> str:
    """Versions of packages in the peers' environment."""
    code = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    found = subprocess.run([PYTHON, "-c", code, *names], check=True, capture_output=True, text=True)
    return ", ".join(map(" ".join, zip(names, found.stdout.split(), strict=True)))


def surroundings(caches: Path) -> dict[str, str]:
    """Environment variables of a subject: caches of its own, no network, no colours."""
    inherited = ("PATH", "HOME", "LANG", "TMPDIR")
    return {name: os.environ[name] for name in inherited if name in os.environ} | {
        "HF_HOME": str(caches / "huggingface"),
        "XDG_CACHE_HOME": str(caches / "xdg"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }


def _pip(*arguments: str) -> None:
    subprocess.run(
        [PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True
    )


def _put_stub() -> None:
    library = PEERS / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    stub = library / "site-packages" / "torchaudio"
    stub.mkdir()
    (stub / "__init__.py").write_text(STUB)
