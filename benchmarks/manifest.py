"""The plan and the manifest of a save of Llama 3.1 405B with its optimizer, on 8 to 16,384 ranks.

    .venv/bin/python benchmarks/manifest.py [--rounds 3]

The code of a save plans for tensors that have shapes, but no memory: one process is rank 0, or the
last rank, and what it would receive from the others is computed before, and pickled as torch does.
Weights are bfloat16, and each has two moments in float32: 3,411 tensors, 4 TB. Format 1.0 has a
piece for each tensor and rank, format 1.1 a rule for each tensor.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from statistics import median

import measure
import torch

from surefoot.checkpoint.disk import strict_json
from surefoot.checkpoint.disk.grid import (
    HASH_LIST,
    RANK_FOLDER,
    num_blocks,
    parse_grid,
)
from surefoot.checkpoint.disk.manifest import Manifest, Piece, check_consistent, dump, parse
from surefoot.checkpoint.disk.tensorfile import num_bytes
from surefoot.checkpoint.saving import _grid_plan, preparation
from surefoot.checkpoint.saving._balancing import Holding, LocalTensor, shared_out
from surefoot.checkpoint.saving._writing import Shard, Written
from surefoot.checkpoint.saving.preparation import SavePlan, WriterGroup, _shards
from surefoot.checkpoint.state.states import LocalBox
from surefoot.parallel.sharding import AxisShard, Box, local_offset_and_shape
from surefoot.storage.files import digest

LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 126, 16_384, 53_248, 1024, 128_256
MESHES: list[dict[str, int]] = [
    {"dp_shard": 8},
    {"dp_shard": 64},
    {"dp_shard": 1024},
    {"pp": 16, "dp_shard": 8, "tp": 8},
    {"dp_shard": 16_384},
    {"pp": 16, "dp_shard": 128, "tp": 8},
]
FEW = 64  # ranks for which format 1.0 is planned here; above about 130 it cannot be read
HASH = "0123456789abcdef" * 2


def shapes() -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    """Name, shape, the dimension along which tensor parallelism shards it, and the layer."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0, 0
    for layer in range(LAYERS):
        for name, shape, dim in (
            ("self_attn.q_proj", (HIDDEN, HIDDEN), 0),
            ("self_attn.k_proj", (KEYS, HIDDEN), 0),
            ("self_attn.v_proj", (KEYS, HIDDEN), 0),
            ("self_attn.o_proj", (HIDDEN, HIDDEN), 1),
            ("mlp.gate_proj", (INNER, HIDDEN), 0),
            ("mlp.up_proj", (INNER, HIDDEN), 0),
            ("mlp.down_proj", (HIDDEN, INNER), 1),
            ("input_layernorm", (HIDDEN,), None),
            ("post_attention_layernorm", (HIDDEN,), None),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape, dim, layer
    yield "model.norm.weight", (HIDDEN,), None, LAYERS - 1
    yield "lm_head.weight", (VOCABULARY, HIDDEN), 0, LAYERS - 1


@dataclass(frozen=True)
class Rank:
    """What one rank has: as ``prepare`` finds it in the states of a run."""

    number: int
    mesh: Mapping[str, int]

    def tensors(self) -> dict[str, dict[str, LocalTensor]]:
        """Its boxes by role and name, and their sharding."""
        place = _grid_plan.place_of(self.number, self.mesh)
        holding: dict[str, dict[str, LocalTensor]] = {"model": {}, "optimizer": {}}
        for name, shape, dim, layer in shapes():
            if layer * self.mesh.get("pp", 1) // LAYERS != place.get("pp", 0):
                continue
            tp = [] if dim is None or "tp" not in self.mesh else [AxisShard("tp", dim)]
            cuts = (*tp, AxisShard("dp_shard", 0))
            box = Box(*local_offset_and_shape(shape, cuts, self.mesh, place))
            holding["model"][name] = LocalTensor("BF16", shape, box, cuts)
            for slot in ("exp_avg", "exp_avg_sq"):
                holding["optimizer"][f"{name}.{slot}"] = LocalTensor("F32", shape, box, cuts)
        return holding


def planned(group: WriterGroup, holding: Holding) -> tuple[SavePlan, list[Shard]]:
    """The plan of a save, and this rank's files of it."""
    one = torch.empty(())  # in place of every element
    parts = {
        role: {n: LocalBox(one.expand(t.box.shape), t.shape, t.box) for n, t in of.items()}
        for role, of in holding.items()
    }
    _, _, plan = group.agree(holding, {}, None)
    own = {
        role: {n: parts[role][n].narrowed(box) for n, box in plan.mine.get(role, {}).items()}
        for role in parts
    }
    return plan, _shards(own, plan.tensors, "full", 5_000_000_000, group)


def group_of(rank: Rank) -> WriterGroup:
    """A group whose other ranks have answered before; torch gathers pickled objects."""
    size, stages = prod(rank.mesh.values()), rank.mesh.get("pp", 1)
    group = WriterGroup("distributed", rank.number, size, rank.mesh)
    if not preparation.uses_grid(group):
        holdings = [pickle.dumps((Rank(r, rank.mesh).tensors(), {})) for r in range(size)]
        answers = [pickle.dumps((digest(each), "nonce", None)) for each in holdings]
        waiting = [holdings, answers]
        return replace(group, exchange=lambda _: [pickle.loads(each) for each in waiting.pop()])
    firsts = [Rank(stage * (size // stages), rank.mesh) for stage in range(stages)]
    rules = [_grid_plan.split_rules(r.tensors(), r.mesh, r.number)[0] for r in firsts]
    digests, rest = [digest(repr(each).encode()) for each in rules], digest(repr({}).encode())
    stage_of = [_grid_plan.place_of(r, rank.mesh).get("pp", 0) for r in range(size)]
    answers = [pickle.dumps((digests[stage], rest, "nonce", None)) for stage in stage_of]
    of_stages = [pickle.dumps((each, {})) for each in rules]
    return replace(
        group,
        exchange=lambda _: [pickle.loads(answer) for answer in answers],
        of_stages=lambda _: [pickle.loads(each) for each in of_stages],
    )


def written_by(plan: SavePlan, shards: list[Shard], rank: int, own: int) -> Written:
    """What a rank reports; the files of all are as large as those of rank ``own``."""
    written, folder = Written(), RANK_FOLDER.format(rank)
    for shard in shards:
        name = f"{folder}/{shard.plan.name.partition('/')[2]}"
        written.files[name], written.hashes[name] = shard.plan.header.file_size, HASH
        if plan.grid is None:
            written.pieces += [
                Piece(
                    tensor=f"{shard.role}/{key}",
                    dtype=entry.dtype,
                    shape=plan.tensors[shard.role][key][1],
                    box=plan.mine[shard.role][key],
                    file=name,
                    key=key,
                    hash=HASH,
                )
                for key, entry in shard.plan.header.entries.items()
            ]
    if plan.grid is not None:
        data, name = strict_json.dump(_listed(plan, own), indent=0), HASH_LIST.format(rank)
        written.files[name], written.hashes[name] = len(data), digest(data)
    return written


def _listed(plan: SavePlan, rank: int) -> dict[str, dict[str, list[str]]]:
    rules = plan.grid.rule_of if plan.grid else {}
    hashes = {
        tensor: [HASH] * (1 + num_blocks(num_bytes(rules[tensor].dtype, box.shape)))
        for tensor, box in (plan.grid.boxes_of(rank) if plan.grid else {}).items()
    }
    return {"model.safetensors": hashes}


def _sent(plan: SavePlan) -> dict[str, object]:
    sent: dict[str, object] = json.loads(json.dumps(plan.grid.dump() if plan.grid else {}))
    return sent


def measured(mesh: Mapping[str, int], number: int) -> dict[str, float]:
    """CPU seconds, bytes and counts of one rank."""
    size, rank = prod(mesh.values()), Rank(number, mesh)
    holding = rank.tensors()
    group = group_of(rank)
    start = time.process_time()
    plan, shards = planned(group, holding)
    if plan.grid is not None:  # of what the writer process is sent
        parse_grid(_sent(plan), mesh, "it").boxes_of(number)
    own = written_by(plan, shards, number, number)
    found = {"plan": time.process_time() - start}
    found["list"] = own.files.get(HASH_LIST.format(number), 0)
    if number == 0:
        start = time.process_time()
        reports = list(_reports(plan, shards, own, size, mesh))
        found["others"] = time.process_time() - start  # of building them, which others do
        start = time.process_time()
        for other, report in enumerate(reports, 1):
            own.add(json.loads(report), f"report of rank {other}")
        manifest = Manifest(
            step=1,
            kind="full",
            created="2026-01-31T12:34:56Z",
            versions={},
            files=own.files,
            hashes=own.hashes,
            pieces=own.pieces,
            layout="distributed",
            world_size=size,
            mesh=mesh,
            grid=plan.grid,
        )
        check_consistent(manifest, "it")
        data = dump(manifest)
        found["merge"] = time.process_time() - start
        start = time.process_time()
        parse(data, "it")
        found |= {"parse": time.process_time() - start, "bytes": len(data)}
        found["objects"] = len(own.files) + 1
    return found | {"GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def _reports(
    plan: SavePlan, shards: list[Shard], own: Written, size: int, mesh: Mapping[str, int]
) -> Iterator[bytes]:
    if plan.grid is None:
        plans = _boxes_of_all(size, mesh)
        for rank in range(1, size):
            pieces = replace(plan, mine=plans[rank])
            yield json.dumps(written_by(pieces, shards, rank, rank).report).encode()
        return
    for rank in range(1, size):
        files = {_renamed(name, rank): length for name, length in own.files.items()}
        hashes = {_renamed(name, rank): value for name, value in own.hashes.items()}
        yield json.dumps(Written(files, hashes).report).encode()


def _boxes_of_all(size: int, mesh: Mapping[str, int]) -> list[dict[str, dict[str, Box]]]:
    return shared_out([Rank(rank, mesh).tensors() for rank in range(size)])


def _renamed(name: str, rank: int) -> str:
    return f"{RANK_FOLDER.format(rank)}/{name.partition('/')[2]}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        mesh, number, most = json.loads(asked.one)
        preparation.MOST_WITH_PIECES = most
        print(json.dumps(measured(mesh, number)))
        return
    print(measure.machine(), "\n")
    rows = []
    for mesh in MESHES:
        size = prod(mesh.values())
        for version, most in (("1.0", FEW), ("1.1", 1)):
            if version == "1.1" or size <= FEW:
                rounds = asked.rounds if version == "1.1" else 1  # minutes, and what is known
                rows.append([*_row(mesh, most, rounds, version)])
    columns = ["ranks", "format", "a rank, s", "its list", "rank 0: plan, merge, s", "GiB"]
    print(measure.table([*columns, "manifest", "parse, s", "objects"], rows))


def _row(mesh: Mapping[str, int], most: int, rounds: int, version: str) -> Iterator[str]:
    size = prod(mesh.values())
    first, last = ([_run(mesh, number, most) for _ in range(rounds)] for number in (0, size - 1))
    axes = " x ".join(f"{axis} {number}" for axis, number in mesh.items())

    def middle(runs: list[dict[str, float]], key: str) -> float:
        return median(run[key] for run in runs)

    yield f"{size:,}: {axes}"
    yield version
    yield f"{middle(last, 'plan'):.2f}"
    yield f"{middle(last, 'list'):,.0f} B"
    yield f"{middle(first, 'plan'):.2f} + {middle(first, 'merge'):.2f}"
    yield f"{max(run['GiB'] for run in first):.2f}"
    yield f"{middle(first, 'bytes') / 1e6:,.1f} MB"
    yield f"{middle(first, 'parse'):.2f}"
    yield f"{middle(first, 'objects'):,.0f}"


def _run(mesh: Mapping[str, int], number: int, most: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps([mesh, number, most])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
