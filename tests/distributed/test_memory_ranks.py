"""Of two ranks one runs out of memory: replicas split the step together, others start again."""

import json
import os
import sys
import textwrap

import pytest
import torch

import ranks
import small
import spread
import warm
from project import Project, losses, surefoot
from surefoot.errors import OutOfMemoryError, RecipeError
from surefoot.methods import LoRA
from surefoot.recipe.recipe import load
from surefoot.run.folder import opened, with_chosen_settings
from surefoot.training.out_of_memory import FILE
from surefoot.use.estimate import plan as fitting
from surefoot.use.estimate._rank_memory import Machine

TRAIN = {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 3}


def limited(made, rank, step, tokens):
    """Memory for so many tokens of a micro-batch on one rank, from a step on, padding included."""

    def check(module, args, kwargs):
        is_short = made.world.rank == rank and made.state.global_step + 1 >= step
        if is_short and torch.is_grad_enabled() and kwargs["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    made.policy.network.inner.get_decoder().register_forward_pre_hook(check, with_kwargs=True)
    return made


def weights(made):
    found = made.policy.module.state_dict()
    return {n: getattr(t, "full_tensor", lambda t=t: t)().clone() for n, t in found.items()}


def fitted(world, folder, **changes):
    made = spread.trainer(world, folder, method=LoRA(rank=2, dropout=0.2), **changes)
    made.state.max_steps = 3
    return made


def test_replicas_split_a_step_together(tmp_path):
    parallel = {"dp_replicate": 2, "dp_shard": 1}

    def work(world):
        size = {**TRAIN, "micro_batch_size": 2}
        always = fitted(world, tmp_path / "a", train=size, parallel=parallel)
        always.fit()
        split = fitted(world, tmp_path / "b", train=TRAIN, parallel=parallel)
        limited(split, 1, 1, tokens=24).fit()
        small.assert_same_weights(weights(split), weights(always))
        return split.windows.loader.batching.micro_batch_size

    assert ranks.run(2, work, **parallel) == [2, 2]


def test_a_rank_that_others_wait_for_ends_with_a_sentence_and_writes_the_size_down(tmp_path):
    def work(world):
        made = fitted(world, tmp_path, train=TRAIN)
        try:
            limited(made, 1, 1, tokens=24).fit()
        except OutOfMemoryError as error:
            os._exit(0) if world.rank == 0 else None
            (tmp_path / "told").write_text(str(error))
            os._exit(0)
        except RuntimeError:
            os._exit(0)  # the other rank has lost it

    with pytest.raises(AssertionError, match="hung or died"):
        ranks.run(2, work, dp_shard=2)
    told = (tmp_path / "told").read_text()
    assert told.startswith("rank 1 ran out of memory (CUDA out of memory. Tried to allocate 2 GiB)")
    assert "step 1 is repeated with micro-batches of 2 examples instead of 4" in told
    assert json.loads((tmp_path / FILE).read_text())["micro_batch_size"] == [[1, 2, 4]]


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({}, marks=pytest.mark.proof)], ids=str)
def test_one_rank_chooses_the_size_for_all_by_the_mesh_that_they_form(mesh, tmp_path, monkeypatch):
    """Without ``num_processes``, as another launcher has started them."""
    train = {"global_batch_size": 8, "micro_batch_size": "auto"}
    project = Project(tmp_path, train=train, checkpoint={"async_save": False})
    recipe = load(project.recipe, [f"parallel.{axis}={size}" for axis, size in mesh.items()])
    machine = Machine(2, on_gpu=False)
    needed = fitting.Trial.of(recipe, machine, "none").peak(2)
    free = [int(needed / (1 - fitting.SPARE)) + 1]
    monkeypatch.setattr(fitting, "available", lambda num_local_ranks: free[0])

    def work(world):
        def choose(*given):
            assert world.is_main
            return fitting.choose_settings(*given)

        with opened(recipe, world) as folder:
            size = with_chosen_settings(recipe, folder, world, choose).train.micro_batch_size
            free[0] = 1000
            with pytest.raises(RecipeError, match="not even one example per micro-batch fits"):
                with_chosen_settings(recipe, folder, world, choose)
        return size

    assert ranks.run(2, work, **mesh) == [2, 2]


@pytest.mark.proof
def test_a_run_of_two_ranks_chooses_a_size_and_keeps_it(tmp_path):
    train = {"global_batch_size": 8, "micro_batch_size": "auto", "max_steps": 2}
    project = Project(tmp_path, train=train, parallel={"num_processes": 2, "tp": 2})
    for max_steps in (2, 3):
        code, _, err = surefoot("train", project.recipe, f"train.max_steps={max_steps}")
        assert code == 0, err
        assert err.count("(auto: ") == (max_steps == 2), err
        assert load(project.run).train.micro_batch_size == 8
    assert losses(project.run).keys() == {1, 2, 3}


@pytest.mark.proof
@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.proof),
        pytest.param({"dp_shard": 2}, marks=pytest.mark.proof),
        pytest.param({"tp": 2, "sequence_parallel": True}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_recomputation_by_policy_changes_no_bit_on_a_mesh(mesh, tmp_path):
    def work(world):
        policies = (False, "selective", "full", "offload")
        options = {"parallel": mesh, "attention_dropout": 0.2, "packing": True}
        return [
            spread.learn(spread.trainer(world, tmp_path, recompute=one, **options), 2)
            for one in policies
        ]

    for plain, *others in ranks.run(2, work, **mesh):
        assert all(one == plain for one in others)


SCRIPT = """
import os, sys, torch
from surefoot.cli.main import main
from surefoot.parallel.launcher import launch
from surefoot.run import training_run
from surefoot.training.callback import TrainerCallback

class Short(TrainerCallback):
    def on_train_begin(self, args, state, control):
        def check(module, inputs, kwargs):
            is_rank = os.environ["RANK"] == "1" and state.global_step + 1 >= 4
            if is_rank and torch.is_grad_enabled() and len(kwargs["input_ids"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        model = args.model
        model.get_decoder().register_forward_pre_hook(check, with_kwargs=True)

if "RANK" not in os.environ:
    raise SystemExit(launch([sys.executable, *sys.argv], 2))
plain = training_run.run
training_run.run = lambda *a, **k: plain(*a, **k | {"callbacks": [Short()]})
main()
"""


@pytest.mark.proof
def test_a_run_on_shards_starts_again_by_itself_with_the_size_that_each_step_had(tmp_path):
    project = Project(tmp_path, train={**TRAIN, "max_steps": 5}, data={"packing": False})
    project.sections["checkpoint"] = {"save_steps": 2}
    project.write()
    script = tmp_path / "short.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, script, "train", project.recipe, "parallel.num_processes=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restarting all ranks with smaller batches") == 1, done.stderr
    assert "rank 1 ran out of memory" in done.stderr
    assert "micro-batches have 2 examples from step 4 on" in done.stderr
    assert losses(project.run).keys() == {1, 2, 3, 4, 5}
    assert json.loads((project.run / FILE).read_text())["micro_batch_size"] == [[4, 2, 4]]
