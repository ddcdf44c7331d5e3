"""Schedules against the formulas of transformers and the papers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.optimizer import ON_PLATEAU, SCHEDULES, Schedule
from surefoot.optim.plateau import Plateau, Reductions


def factors_of_transformers(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "make"),
    [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)],
)
def test_after_warm_up_the_shape_is_that_of_transformers(name, make):
    expected = factors_of_transformers(lambda o: make(o, 5, 40), 40)
    schedule = Schedule(name=name, total_steps=40, warmup_steps=5)
    assert [schedule.factor(s) for s in range(5, 40)] == pytest.approx(expected[5:])


def test_wsd_stays_and_then_decays_as_transformers_does():
    expected = factors_of_transformers(
        lambda o: get_wsd_schedule(
            o, num_warmup_steps=4, num_decay_steps=10, num_training_steps=40, decay_type="linear"
        ),
        40,
    )
    schedule = Schedule(name="wsd", total_steps=40, warmup_steps=4, decay_steps=10)
    assert [schedule.factor(s) for s in range(4, 40)] == pytest.approx(expected[4:])


def test_warm_up_rises_evenly_and_does_not_waste_the_first_step():
    schedule = Schedule(name="cosine", total_steps=100, warmup_steps=4)
    assert [schedule.factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


@given(
    st.integers(0, 10**6),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(0, 3),
    st.sampled_from([0.0, 1e-4, 0.1]),
    st.sampled_from(["rel", "abs"]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)
def test_a_plateau_reduces_where_torch_does(
    seed, factor, patience, threshold, mode, cooldown, lowest, greater
):
    """Also in two halves, the second of which has the state of the first."""
    rule = Plateau(
        factor=factor,
        patience=patience,
        threshold=threshold,
        threshold_mode=mode,
        cooldown=cooldown,
    )
    peak = 1e-3
    optim = AdamW(learning_rate=peak, schedule=ON_PLATEAU, plateau=rule, min_lr_ratio=lowest)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode="max" if greater else "min",
        factor=factor,
        patience=patience,
        threshold=threshold,
        threshold_mode=mode,
        cooldown=cooldown,
        min_lr=lowest * peak,
    )
    rng = np.random.default_rng(seed)
    metrics = 2 + rng.normal(size=40) * rng.choice([0.01, 1.0])
    metrics[rng.random(40) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    schedule = optim.schedule_over(40)
    for step, metric in enumerate(map(float, metrics)):
        if step == 20:
            state = Reductions()
            state.load_state_dict(schedule.reductions.state_dict())
            schedule = optim.schedule_over(40, state)
        schedule.evaluated("eval_loss", metric, step, greater=greater)
        theirs.step(metric)
        assert peak * schedule.factor(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)


def test_no_evaluation_counts_in_the_warm_up_and_another_metric_begins_anew():
    rule = Plateau(patience=0, factor=0.5)
    schedule = AdamW(schedule=ON_PLATEAU, plateau=rule, warmup_steps=4).schedule_over(20)
    for step in range(4):
        schedule.evaluated("eval_loss", 2.0 + step, step, greater=False)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for step, factor in ((4, 1.0), (5, 0.5), (6, 0.25)):
        schedule.evaluated("eval_loss", 2.0, step, greater=False)
        assert schedule.factor(step) == factor
    schedule.evaluated("eval_accuracy", 0.5, 7, greater=True)
    assert schedule.factor(7) == 0.25


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 300),
    st.integers(0, 300),
    st.floats(0, 1),
    st.integers(0, 300),
)
def test_factors_stay_in_range_and_never_rise_after_warm_up(name, total, warmup, floor, decay):
    schedule = Schedule(
        name=name,
        total_steps=total,
        warmup_steps=min(warmup, total),
        min_ratio=floor,
        decay_steps=decay,
    )
    found = [schedule.factor(s) for s in range(total + 2)]
    assert all(0 <= f <= 1 + 1e-9 for f in found)
    after = found[schedule.warmup_steps :]
    assert all(a >= b - 1e-9 for a, b in pairwise(after))
