"""Copy a folder of weights once, warm, and flush it. Run by checkpoint.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import costs
import state
from safetensors.torch import save_file

from surefoot.checkpoint import copy, open_folder


def main(name: str, folder: Path, layers: int) -> None:
    """One subject."""
    made = state.model(layers)
    source, target = folder / "source", folder / "target"
    source.mkdir()
    tensors = state.tensors(made, state.optimizer(made))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "model.safetensors").read_bytes()
    work: Callable[[], object]
    if name == "cp":
        target.mkdir()
        command = ["cp", source / "model.safetensors", target]
        work = lambda: (subprocess.run(command, check=True), costs.sync(target))  # noqa: E731
    else:
        dtype = "bfloat16" if name.endswith("cast") else None
        work = lambda: copy(open_folder(source), target, dtype=dtype)  # noqa: E731
    print(json.dumps(state.timed(work)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
