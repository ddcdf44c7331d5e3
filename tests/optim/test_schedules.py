"""Schedules against the formulas of transformers and the papers."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from surefoot.optim.optimizer import SCHEDULES, Schedule


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
