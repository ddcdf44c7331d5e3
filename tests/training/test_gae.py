"""Advantages, value losses, KL penalties and running moments, from their definitions in float64."""

import math

import numpy as np
import pytest

from surefoot.training.policy_gradient import (
    RunningMoments,
    adapted_coefficient,
    explained_variance,
    generalized_advantages,
    kl_estimates,
    whitened,
)

RANDOM = np.random.default_rng(3)
REWARDS, VALUES = RANDOM.normal(size=7), RANDOM.normal(size=7)


def test_lambda_one_is_the_reward_to_go_and_lambda_zero_the_next_step():
    to_go = [math.fsum(0.9 ** (s - t) * REWARDS[s] for s in range(t, 7)) for t in range(7)]
    found = generalized_advantages(REWARDS, VALUES, gamma=0.9, gae_lambda=1)
    assert found + VALUES == pytest.approx(to_go, rel=1e-12)
    one_step = REWARDS + 0.9 * np.append(VALUES[1:], 0) - VALUES
    found = generalized_advantages(REWARDS, VALUES, gamma=0.9, gae_lambda=0)
    assert found == pytest.approx(one_step, rel=1e-12)


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


def test_estimates_of_the_kl_divergence():
    own, other = RANDOM.normal(size=(2, 50))
    k1 = kl_estimates(own, other, "k1")
    assert k1 == pytest.approx(own - other, rel=1e-12)
    ratios = [math.exp(b - a) for a, b in zip(own, other, strict=True)]
    expected = [ratio - 1 - math.log(ratio) for ratio in ratios]
    assert kl_estimates(own, other, "k3") == pytest.approx(expected, rel=1e-9, abs=1e-12)
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    divergence = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):  # both are unbiased
        assert p @ kl_estimates(np.log(p), np.log(q), kind) == pytest.approx(divergence)


@pytest.mark.parametrize(
    ("kl", "expected"), [(6.0, 0.2), (6.6, 0.2 * (1 + 0.1 * 64 / 1e4)), (60, 0.2 * 1.00128)]
)
def test_the_coefficient_follows_the_divergence_by_a_fifth_of_the_error_at_most(kl, expected):
    found = adapted_coefficient(0.2, kl, target=6.0, count=64, horizon=10_000)
    assert found == pytest.approx(expected, rel=1e-12)


def test_moments_of_parts_are_those_of_all_numbers():
    moments = RunningMoments()
    for part in ([1.5], [], [2.0, -3.0, 4.0], list(REWARDS)):
        moments = RunningMoments.of(moments.added(part).state())
    everything = np.array([1.5, 2.0, -3.0, 4.0, *REWARDS])
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(everything.mean(), rel=1e-12)
    assert moments.deviation == pytest.approx(everything.std(ddof=1), rel=1e-12)
    assert RunningMoments().deviation == 0 == RunningMoments().added([2.0]).deviation
