"""What every process reads and holds at the start of a run, beside loading the whole model.

    .venv/bin/python benchmarks/shares.py [--processes 2 4] [--layers 14]

A random Llama in float32 is filled on the CPU, spread with FSDP2 (and by tensors, where there are
four processes): once each process reads its part, once each loads the model with
``from_pretrained`` and lets go of the rest. Bytes are those of the file that are read; memory is
what the resident set grows by, at its peak and in the end, after a tiny model has been started.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import machine, say

WAYS = ("parts", "whole")
MEGA = 1e6


def rank(folder: Path, way: str) -> None:
    """Start as one of the processes; what it took, as JSON on the standard output."""
    import torch
    from torch import nn

    from surefoot.data.section import DataSection
    from surefoot.methods._full import Full
    from surefoot.model.section import ModelSection
    from surefoot.optim._variants.adamw import AdamW
    from surefoot.parallel.section import ParallelSection
    from surefoot.parallel.sharded_model import shard
    from surefoot.parallel.world import ALONE, World, joined
    from surefoot.recipe.recipe import Recipe
    from surefoot.run import assembly
    from surefoot.stages._sft import SFT
    from surefoot.storage import files
    from surefoot.training.section import TrainSection

    count = int(os.environ["WORLD_SIZE"])
    section = ParallelSection(num_processes=count, tp=2 if count > 3 else 1)
    torch.set_num_threads(1)

    def begin(model: Path, world: World) -> nn.Module:
        recipe = Recipe(
            model=ModelSection(path=str(model)),
            data=DataSection(datasets=("none",), packing=False),
            method=Full(),
            stage=SFT(),
            train=TrainSection(output_dir=folder / "out"),
            optim=AdamW(),
            parallel=section,
        )
        shared = ALONE if way == "whole" else world
        policy = assembly.build_policy(recipe, model, range(10), shared)
        cuts = shard(policy.model, policy.inner, world, section, dtype=None)
        if policy.values is not None:
            policy.values.fill(policy.model, cuts, world)
        return policy.model

    with joined(section) as world:
        begin(folder / "tiny", world)  # what is imported and made once
        files.os = counting = _Counting(str(folder))
        world.wait()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before, started = _memory("VmRSS"), time.perf_counter()
        model = begin(folder / "model", world)
        seconds = time.perf_counter() - started
        world.wait()
        found = {
            "read": counting.count if way == "parts" else _size(folder / "model"),
            "share": sum(p.to_local().nbytes for p in model.parameters()),
            "peak": _memory("VmHWM") - before,
            "held": _memory("VmRSS") - before,
            "seconds": seconds,
        }
    sys.stdout.write(json.dumps(found))


class _Counting:
    """``os``, that counts the bytes it reads of the files in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder, self.count, self.opened = folder, 0, set()

    def __getattr__(self, name: str):
        return getattr(os, name)

    def open(self, path, *args, **kwargs):
        descriptor = os.open(path, *args, **kwargs)
        if str(path).startswith(self.folder):
            self.opened.add(descriptor)
        return descriptor

    def preadv(self, descriptor, *args):
        count = os.preadv(descriptor, *args)
        self.count += count if descriptor in self.opened else 0
        return count


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def start(folder: Path, count: int, way: str) -> list[dict[str, float]]:
    """What each of ``count`` processes took."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    env["MASTER_PORT"] = str(port)
    command = [sys.executable, __file__, "--rank", str(folder), way]
    running = [
        subprocess.Popen(
            command, env={**env, "RANK": str(i), "LOCAL_RANK": str(i)}, stdout=subprocess.PIPE
        )
        for i in range(count)
    ]
    return [json.loads(process.communicate()[0]) for process in running]


def save_model(folder: Path, **sizes: int) -> None:
    """A random model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**heads, **sizes)).save_pretrained(folder)


def _size(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


KEYS = ("share", "read", "peak", "held", "seconds")
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 16_000}


def best(folder: Path, count: int, way: str, repetitions: int) -> list[float]:
    """Of the process that takes most, the least of some rounds."""
    rounds = []
    for _ in range(repetitions):
        ranks = start(folder, count, way)
        rounds.append([max(one[key] for one in ranks) for key in KEYS])
    return [min(one[i] for one in rounds) for i in range(len(KEYS))]


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(Path(given.rank[0]), given.rank[1])
        return
    say(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "tiny", **TINY)
        save_model(folder / "model", num_hidden_layers=given.layers, **SIZES)
        say(f"weights: {_size(folder / 'model') / MEGA:.0f} MB")
        say("| processes | way | MB share | MB read | MB at the peak | MB held | seconds |")
        say("|" + "---|" * 7)
        for count in given.processes:
            for way in WAYS:
                *sizes, seconds = best(folder, count, way, given.repetitions)
                figures = " | ".join(f"{value / MEGA:.0f}" for value in sizes)
                say(f"| {count} | {way} | {figures} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
