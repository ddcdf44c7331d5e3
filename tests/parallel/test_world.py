"""Who this process is, and what a recipe's axes make of so many processes."""

import itertools
import logging
import math
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import commands
import ranks
from each import each
from surefoot import log
from surefoot.errors import LostPeerError, RecipeError, RunError
from surefoot.generate.generation import ReplicaShare
from surefoot.network.network import Network
from surefoot.parallel.section import ParallelSection, launched, name_ranks
from surefoot.parallel.sharding import AXES
from surefoot.parallel.world import ALONE, RowGroup, World, connected, gpu_of, joined
from surefoot.recipe.recipe import read

logger = logging.getLogger("surefoot")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "a"}


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_launchers_say_who_a_process_is(environment):
    assert launched(environment) == (3, 8, 1)


@pytest.mark.parametrize(
    ("tasks", "local"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "0"}, "4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,3(x2)", "SLURM_NODEID": "2"}, "3"),
        ({"SLURM_NTASKS_PER_NODE": "4"}, "4"),
        ({}, None),
    ],
    ids=str,
)
def test_ranks_of_slurm_get_the_names_of_torchrun(tasks, local):
    environment = {**SLURM, **tasks}
    name_ranks(environment)
    expected = TORCHRUN | ({} if local is None else {"LOCAL_WORLD_SIZE": local})
    assert {**environment, **expected} == environment
    assert launched(environment) == (3, 8, 1)


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN,
        {**SLURM, **TORCHRUN, "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},  # by srun
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_others_keep_their_names(environment):
    after = dict(environment)
    name_ranks(after)
    assert after == environment


def test_under_slurm_one_rank_logs_and_evaluates(capsys):
    slurm = {**SLURM, "MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, slurm), mock.patch.object(logger, "handlers", []):
        commands.ok("version")
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "8")
        logger.info("every rank would say this")
        logger.warning("this too")
    assert capsys.readouterr().err == "[rank 3] warning: this too\n"


def test_a_rank_has_the_gpu_of_its_number_or_the_one_that_it_sees():
    assert [gpu_of(local, 4) for local in range(4)] == [0, 1, 2, 3]
    assert [gpu_of(local, 1) for local in (0, 3)] == [0, 0]
    with pytest.raises(RunError, match="rank 4 of this machine has no GPU: there are 4"):
        gpu_of(4, 4)


def test_a_batch_job_of_one_process_is_nobodys_rank():
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert launched({}) is None


@pytest.mark.parametrize(
    ("settings", "size", "axes"),
    [
        ({}, 8, (1, 1, 8, 1)),
        ({"dp_replicate": 8}, 8, (1, 8, 1, 1)),
        ({"dp_replicate": 2}, 8, (1, 2, 4, 1)),
        ({"dp_shard": 4, "dp_replicate": 2}, 8, (1, 2, 4, 1)),
        ({"tp": 2}, 8, (1, 1, 4, 2)),
        ({"tp": 2, "dp_replicate": 2}, 8, (1, 2, 2, 2)),
        ({"tp": 8}, 8, (1, 1, 1, 8)),
        ({"pp": 2}, 8, (2, 1, 4, 1)),
        ({"pp": 2, "tp": 2, "dp_replicate": 2}, 8, (2, 2, 1, 2)),
        ({}, 1, (1, 1, 1, 1)),
    ],
)
def test_axes_share_out_the_processes(settings, size, axes):
    assert tuple(ParallelSection(**settings).axes(size).values()) == axes


def test_axes_that_do_not_fit_are_named():
    with pytest.raises(
        ValueError, match="pp x dp_replicate x dp_shard x tp is 1 x 2 x 4 x 1, but there are 6"
    ):
        ParallelSection(dp_replicate=2, dp_shard=4).axes(6)
    with pytest.raises(ValueError, match="but there are 4"):
        ParallelSection(num_processes=4, dp_shard=3)
    with pytest.raises(ValueError, match="1 x 1 x 3, but there are 4"):
        ParallelSection(num_processes=4, tp=3)
    with pytest.raises(ValueError, match="cp is 4, which does not divide dp_replicate x dp_shard"):
        ParallelSection(cp=4, tp=2).axes(4)
    assert ParallelSection(cp=2, dp_replicate=2, tp=2).num_data_ranks(16) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"cp": 0},
        {"num_processes": 0},
        {"dp_shard": 0},
        {"tp": 0},
        {"pp": 0},
        {"pp_stages_per_rank": 2},  # of schedule 1f1b
        {"max_restarts": -1},
        {"timeout": 0},
    ],
)
def test_nonsense_is_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ParallelSection(**settings)


def test_the_timeout_of_older_recipes_is_the_default_or_names_the_key_of_today():
    old = {"model": {"path": "m"}, "data": {"datasets": ["d"]}, "stage": "sft"}
    old["train"] = {"output_dir": "run"}
    assert read({**old, "parallel": {"timeout_minutes": 10.0}}).parallel.timeout == "auto"
    with pytest.raises(RecipeError, match=r"parallel.timeout_minutes: .*now parallel.timeout"):
        read({**old, "parallel": {"timeout_minutes": 30.0}})
    assert read({**old, "parallel": {"timeout": 30}}).parallel.timeout == 30
    with pytest.raises(RecipeError, match=r"parallel.timeout: expected a number or one of auto"):
        read({**old, "parallel": {"timeout": "soon"}})


def placed(rank, *shape, names=AXES):
    """A rank of a mesh, without a process group."""
    place = [int(n) for n in np.unravel_index(rank, shape)]
    mesh = SimpleNamespace(shape=shape, mesh_dim_names=names, get_coordinate=lambda: place)
    mesh.mesh = torch.arange(math.prod(shape)).reshape(shape)
    return World(rank, math.prod(shape), mesh)


def test_those_who_work_on_the_same_examples_have_one_share_of_them():
    for rank in range(8):
        world = placed(rank, 1, 2, 2, 2)
        assert (world.data_rank, world.num_data_ranks, world.tp) == (rank // 2, 4, 2)
        world = placed(rank, 2, 1, 2, 2)
        assert (world.data_rank, world.num_data_ranks) == (rank % 4 // 2, 2)
        assert (world.pp_rank, world.pp) == (rank // 4, 2)
    assert (ALONE.data_rank, ALONE.num_data_ranks, ALONE.tp, ALONE.pp) == (0, 1, 1, 1)


SIZES = {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "tp": 2, "cp": 2}  # and one that is new


@each(itertools.permutations(SIZES), "-".join)
def test_no_answer_depends_on_the_order_of_the_axes(names):
    """Every rank has the coordinates, shares and groups that numpy gives a mesh of this order."""
    shape = [SIZES[axis] for axis in names]
    every = np.arange(math.prod(shape)).reshape(shape)
    tables = dict(zip(names, np.indices(shape), strict=True))  # the coordinates of all ranks
    data = tables["dp_replicate"] * SIZES["dp_shard"] + tables["dp_shard"]
    is_same = sum(tables[axis] for axis in ("pp", "tp", "cp")) == 0  # the first of its examples
    replica = tables["dp_replicate"]
    is_leader = sum(tables[axis] for axis in names if axis != "dp_replicate") == 0
    for rank in range(every.size):
        world, at = placed(rank, *shape, names=names), np.unravel_index(rank, shape)
        assert {axis: world.rank_along(axis) for axis in names} == {
            axis: tables[axis][at] for axis in names
        }
        assert (world.data_rank, world.num_data_ranks, world.pp_rank) == (
            data[at],
            6,
            at[names.index("pp")],
        )
        assert world.is_first_of("dp_replicate", "dp_shard") == is_same[at]
        shares = {}
        for only_generates in (False, True):
            one = SimpleNamespace(
                world=world, options=SimpleNamespace(only_generates=only_generates)
            )
            shares[only_generates] = Network.share.fget(one)
        assert shares[False] == ReplicaShare(data[at], 6, is_same[at])
        assert shares[True] == ReplicaShare(replica[at], 3, is_leader[at])
    assert sorted(map(sorted, world.rows_along("tp"))) == sorted(
        np.moveaxis(every, names.index("tp"), -1).reshape(-1, 2).tolist()
    )


def test_no_two_layers_and_shares_draw_the_same_numbers_but_parts_of_one_matrix():
    worlds = [placed(rank, 2, 1, 2, 2) for rank in range(8)]
    assert [worlds[i].draws == worlds[i + 1].draws for i in range(0, 8, 2)] == [True] * 4
    assert len({world.draws for world in worlds}) == 4


def test_ranks_that_share_a_row_have_one_share_of_the_examples_and_draw_other_numbers():
    worlds = [
        replace(placed(rank, 1, 2, 4, 1), row_group=RowGroup(rank % 2, 2)) for rank in range(8)
    ]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {world.num_data_ranks for world in worlds} == {4}
    assert len({world.draws for world in worlds}) == 8
    replicas = placed(1, 1, 2, 1, 1)
    assert replicas.has_replicas_only
    assert not replace(replicas, row_group=RowGroup(1, 2)).has_replicas_only


def test_alone_everything_is_as_it_is():
    assert ALONE.sums([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.largest([1.0]) == [1.0]
    assert ALONE.from_main("x") == "x"
    with ALONE.main_first():
        ALONE.wait()


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_one_that_is_left_of_two_is_told_that_the_axes_do_not_fit(axes, monkeypatch):
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    section = ParallelSection(**axes)
    with pytest.raises(RunError, match="but there is 1 process;"), joined(section):
        pass
    with joined(ParallelSection()) as world:
        assert world == ALONE


@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2}, {"dp_shard": 4}], ids=str)
def test_one_that_nobody_launched_is_told_who_starts_as_many_as_the_axes(axes):
    message = r"but there is 1 process; start as many, with `surefoot train` or torchrun"
    with pytest.raises(RunError, match=message), joined(ParallelSection(**axes)):
        pass


def test_who_loses_another_process_says_that_and_no_more():
    def work(world):
        if world.rank == 1:
            os._exit(3)
        world.wait()

    with pytest.raises(
        AssertionError, match="LostPeerError: rank 0: lost the connection to another rank"
    ):
        ranks.run(2, work)


def test_a_process_group_of_the_program_is_refused_with_what_to_do():
    def work(world):
        with pytest.raises(RunError) as refused, joined(ParallelSection()):
            pass
        return str(refused.value)

    for message in ranks.run(2, work):
        assert message.startswith("this program has a process group already, of 2 ranks over gloo")
        assert "destroy_process_group() before the run, and set MASTER_PORT" in message


def test_a_rank_that_waits_for_others_says_for_whom_and_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(log, "SPEAKS_AFTER", 0.05)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    few = ParallelSection(timeout=0.01)
    with pytest.raises(LostPeerError), connected(few, 0, 2):
        pass
    said = "waiting for rank 1 of 2 at 127.0.0.1:0, for up to 0.01 minutes (parallel.timeout"
    assert caplog.messages[0].startswith(said)
    assert "unset MASTER_ADDR" in caplog.text


def test_what_takes_no_time_is_not_announced(monkeypatch, caplog):
    monkeypatch.setattr(log, "SPEAKS_AFTER", 0.05)
    with log.announced("nobody"):
        pass
    time.sleep(0.1)
    assert not caplog.records
