"""Merge the boxes of eight processes into whole tensors once, warm, and flush (checkpoint.py).

The process that merges has not made the tensors: they would hide its memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import costs
import state
import torch
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.converting.targets import write_dcp
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import TensorsInMemory, copy
from surefoot.parallel.sharding import Mesh

RANKS = Mesh(dp_shard=8)


def make(name: str, folder: Path, layers: int) -> None:
    """The boxes: of a checkpoint of ours, or as PyTorch writes them."""
    made = state.model(layers)
    adam = state.optimizer(made)
    if name.startswith("surefoot_checkpoint"):
        save(folder / "whole", 1, state.states(made, adam))
        (whole,) = committed(folder / "whole")
        reshard(whole, folder / "source", layout="distributed", mesh=RANKS)
        shutil.rmtree(whole)
    else:
        write_dcp(TensorsInMemory(state.tensors(made, adam)), folder / "source", mesh=RANKS)


def main(name: str, folder: Path, layers: int) -> None:
    """One subject."""
    source, target = folder / "source", folder / "target"
    subprocess.run([sys.executable, __file__, name, folder, str(layers), "make"], check=True)
    torch.zeros(1)
    names = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for path in names:
        subprocess.run(["cat", path], check=True, stdout=subprocess.DEVNULL)
    work: Callable[[], object]
    if name == "cp":
        command = ["cp", "-r", source, target]
        work = lambda: (subprocess.run(command, check=True), costs.sync(target))  # noqa: E731
    elif name == "dcp":
        target.mkdir()
        tensors = dict.fromkeys(open_folder(source).shapes(), 1)
        work = lambda: (  # noqa: E731
            consolidate_safetensors_files(
                str(source), str(target), fqn_to_index_mapping=tensors, num_threads=2
            ),
            costs.sync(target),
        )
    elif name == "surefoot_checkpoint":
        work = lambda: reshard(source, target)  # noqa: E731
    elif name == "surefoot_checkpoint_8_to_4":
        work = lambda: reshard(  # noqa: E731
            source, target, layout="distributed", mesh=Mesh(dp_shard=4)
        )
    else:
        work = lambda: copy(open_folder(source), target)  # noqa: E731
    print(json.dumps(state.timed(work)))


if __name__ == "__main__":
    if sys.argv[4:] == ["make"]:
        make(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
