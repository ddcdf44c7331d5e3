"""The best weights of a run of several ranks: each of them ends with its part of them."""

import os
import sys

import torch
from safetensors.torch import load_file

import warm
from plugins.cloud.machines import free_port
from project import Project

SCRIPT = """
import sys, torch, surefoot
outcome = surefoot.train(sys.argv[1])
shards = {n: p.to_local() for n, p in outcome.model.named_parameters()}
torch.save(shards, sys.argv[2])
"""


def test_all_ranks_end_with_the_best_weights(tmp_path):
    sinking = {"greater_is_better": True, "load_best_model_at_end": True}  # the first one is best
    project = Project(
        tmp_path / "p",
        train={"max_steps": 4, "eval_steps": 1, **sinking},
        checkpoint={"save_steps": 1, "keep": None},
        data={"datasets": ["sums"], "eval_datasets": ["sums"]},
        parallel={"dp_shard": 2},
    )
    script, port = tmp_path / "script.py", str(free_port())
    script.write_text(SCRIPT)
    started = [
        warm.Popen(
            [sys.executable, script, project.recipe, tmp_path / f"{rank}.pt"],
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            },
        )
        for rank in range(2)
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    best = load_file(project.run / "checkpoint-1" / "model.safetensors")
    last = load_file(project.run / "checkpoint-4" / "model.safetensors")
    for rank in range(2):
        shards = torch.load(tmp_path / f"{rank}.pt")
        for name, shard in shards.items():
            wanted, other = (w[name].chunk(2)[rank] for w in (best, last))
            assert torch.equal(shard, wanted)
            assert not torch.equal(shard, other)
