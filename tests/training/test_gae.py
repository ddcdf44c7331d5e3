"""What PPO keeps of rewards and values beside the functions that are compared with verl's and
OpenRLHF's: whitened numbers, the variance that values explain, running moments."""

import numpy as np
import pytest

from surefoot.training.policy_gradient import (
    RunningMoments,
    explained_variance,
    whitened,
)

RANDOM = np.random.default_rng(3)
REWARDS = RANDOM.normal(size=7)


def test_whitened_numbers_have_variance_1_and_a_mean_that_moves_only_if_it_should():
    for shift_mean, mean in ((True, 0.0), (False, REWARDS.mean())):
        found = np.concatenate(whitened([REWARDS[:3], REWARDS[3:]], shift_mean=shift_mean))
        assert found.mean() == pytest.approx(mean, abs=1e-12)
        assert found.var(ddof=1) == pytest.approx(1, rel=1e-7)
    assert whitened([np.array([3.0])]) == [[3.0]]


def test_the_variance_that_values_explain():
    returns = [REWARDS[:3], REWARDS[3:]]
    assert explained_variance(returns, returns) == 1
    assert explained_variance([0 * one for one in returns], returns) == pytest.approx(0)
    halves = [one / 2 for one in returns]
    assert explained_variance(halves, returns) == pytest.approx(0.75)
    assert explained_variance(returns, [0 * one for one in returns]) == 0


def test_moments_of_parts_are_those_of_all_numbers():
    moments = RunningMoments()
    for part in ([1.5], [], [2.0, -3.0, 4.0], list(REWARDS)):
        moments = RunningMoments.of(moments.added(part).state())
    everything = np.array([1.5, 2.0, -3.0, 4.0, *REWARDS])
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(everything.mean(), rel=1e-12)
    assert moments.deviation == pytest.approx(everything.std(ddof=1), rel=1e-12)
    assert RunningMoments().deviation == 0 == RunningMoments().added([2.0]).deviation
