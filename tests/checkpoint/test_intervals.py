"""The best interval between saves is the best one, and its goodput that of a simulated run."""

import random
from types import SimpleNamespace

import pytest

from surefoot.checkpoint.saving.intervals import (
    FIRST,
    LEAST,
    MOST,
    FailureCosts,
    seconds_between_failures,
)
from surefoot.checkpoint.section import CheckpointSection
from surefoot.training.control import best_minutes, save_trigger

COSTS = FailureCosts(stall=2.0, save=20.0, restart=30.0)


def simulated(costs, interval, between, failures):
    """The share of the time that was kept, over so many random failures of a run."""
    draw, kept, passed = random.Random(5), 0.0, 0.0
    for _ in range(failures):
        lives = draw.expovariate(1 / between)
        saves = int(max(0.0, lives - costs.save) // (interval + costs.stall))
        kept += saves * interval
        passed += lives + costs.detection + costs.restart
    return kept / passed


@pytest.mark.parametrize("nodes", [128, 2048])
@pytest.mark.parametrize("interval", [120.0, 1200.0])
def test_the_goodput_is_that_of_a_simulated_run(nodes, interval):
    between = seconds_between_failures(nodes)
    found = simulated(COSTS, interval, between, 20_000)
    assert COSTS.goodput(interval, between) == pytest.approx(found, abs=0.003)


@pytest.mark.parametrize("nodes", [128, 512, 2048])
def test_no_other_interval_is_better(nodes):
    between = seconds_between_failures(nodes)
    best = COSTS.best_interval(between)
    assert LEAST < best < MOST
    most = COSTS.goodput(best, between)
    assert all(COSTS.goodput(best * share, between) < most for share in (0.7, 0.9, 1.1, 1.4))


def test_sixteen_thousand_gpus_fail_each_108_minutes_and_keep_97_percent():
    between = seconds_between_failures(16_384 // 8)
    assert between / 60 == pytest.approx(108, abs=1)
    costs = FailureCosts(stall=1.0, save=20.0, restart=30.0)
    assert costs.goodput(costs.best_interval(between), between) > 0.97


def test_the_interval_has_bounds_and_room_for_a_save():
    assert FailureCosts(0.0, 1.0, 5.0).best_interval(1e7) == LEAST
    assert FailureCosts(60.0, 1.0, 5.0).best_interval(1e9) == MOST
    assert FailureCosts(0.01, 500.0, 5.0).best_interval(1e4) == 1000.0
    assert FailureCosts(50.0, 1.0, 5.0).best_interval(20.0) == LEAST
    assert FailureCosts(1.0, 1.0, 1e6).goodput(60.0, 10.0) == 0.0


@pytest.mark.parametrize("minutes", [5.0, "auto"])
def test_one_clock_decides_for_all_ranks(minutes):
    """Each rank does what any does: the clocks of two would save twice, at neighboring steps."""
    section = CheckpointSection(save_steps=None, save_minutes=minutes)
    saver = SimpleNamespace(num_committed=0)
    main, other = (
        save_trigger(section, saver, SimpleNamespace(is_main=is_main)) for is_main in (True, False)
    )
    for trigger in (main, other):
        trigger.clock, trigger.since = lambda: FIRST + 1.0, 0.0
    assert (main.is_due(1), other.is_due(1)) == (True, False)


def test_the_automatic_interval_follows_what_saves_have_taken():
    progress = SimpleNamespace(seconds={"starting": 8.0})
    world = SimpleNamespace(num_nodes=2, progress=progress)
    saver = SimpleNamespace(num_committed=0, blocking_seconds=0.0, save_seconds=0.0)
    assert best_minutes(saver, world) == FIRST / 60
    saver = SimpleNamespace(num_committed=4, blocking_seconds=0.4, save_seconds=2.0)
    expected = FailureCosts(0.1, 2.0, 8.0).best_interval(seconds_between_failures(2))
    assert best_minutes(saver, world) == expected / 60
