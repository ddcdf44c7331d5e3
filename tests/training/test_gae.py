"""Advantages, value losses, KL penalties and running moments, from their definitions in float64."""

import math

import numpy as np
import pytest
import torch

from surefoot.training.policy_gradient import (
    RunningMoments,
    adapted_coefficient,
    clipped_value_losses,
    explained_variance,
    generalized_advantages,
    kl_estimates,
    whitened,
)

RANDOM = np.random.default_rng(3)
REWARDS, VALUES = RANDOM.normal(size=7), RANDOM.normal(size=7)


def by_definition(gamma, gae_lambda):
    """The sum over later one-step errors, each discounted by ``gamma lambda``."""
    count = len(VALUES)
    after = [*VALUES[1:], 0.0]
    deltas = [REWARDS[t] + gamma * after[t] - VALUES[t] for t in range(count)]
    discount = gamma * gae_lambda
    return [
        math.fsum(discount ** (later - t) * deltas[later] for later in range(t, count))
        for t in range(count)
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.5, 0.0])
def test_advantages_are_the_discounted_sums_of_later_errors(gamma, gae_lambda):
    found = generalized_advantages(REWARDS, VALUES, gamma=gamma, gae_lambda=gae_lambda)
    assert found.dtype == np.float64
    assert found == pytest.approx(by_definition(gamma, gae_lambda), rel=1e-12, abs=1e-12)


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


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_losses_and_their_gradients_are_those_of_the_formula(clip):
    made = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 50, dtype=torch.float64, generator=made)
    values.requires_grad_()
    losses = clipped_value_losses(values, old, returns, clip)
    (slopes,) = torch.autograd.grad(losses.sum(), values)
    rows = [x.tolist() for x in (values.detach(), old, returns, losses.detach(), slopes)]
    for value, before, wanted, loss, slope in zip(*rows, strict=True):
        free, near = (value - wanted) ** 2, -1.0
        if clip is not None:
            bounded = before + min(max(value - before, -clip), clip)
            near = (bounded - wanted) ** 2
        assert loss == pytest.approx(0.5 * max(free, near), rel=1e-12)
        is_free = free >= near or (clip is not None and abs(value - before) <= clip)
        assert slope == pytest.approx(value - wanted if is_free else 0.0, rel=1e-12)


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
