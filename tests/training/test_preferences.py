"""Each loss against a loop of plain floats, written from its paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.training import losses as preferences

LOGP = st.floats(-30, -0.01)
PAIRS = st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=5)
BETA = st.floats(0.01, 5)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def chosen_and_rejected(pairs):
    return torch.tensor(pairs, dtype=torch.float64).unbind(1)


def same(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@given(PAIRS, BETA, st.floats(0, 0.49))
def test_sigmoid_is_dpo_with_labels_that_may_be_wrong(pairs, beta, epsilon):
    chosen, rejected = chosen_and_rejected(pairs)
    expected = [
        -(1 - epsilon) * log_sigmoid(beta * (w - l)) - epsilon * log_sigmoid(beta * (l - w))
        for w, l in pairs  # noqa: E741
    ]
    same(preferences.sigmoid(chosen - rejected, beta, epsilon), expected)


@given(PAIRS, BETA)
def test_hinge_and_ipo_want_a_margin(pairs, beta):
    chosen, rejected = chosen_and_rejected(pairs)
    margins = [w - l for w, l in pairs]  # noqa: E741
    same(preferences.hinge(chosen - rejected, beta), [max(0, 1 - beta * m) for m in margins])
    same(preferences.ipo(chosen - rejected, beta), [(m - 0.5 / beta) ** 2 for m in margins])


@given(PAIRS, BETA, st.floats(0, 3))
def test_simpo_wants_the_reward_higher_by_gamma(pairs, beta, gamma):
    chosen, rejected = chosen_and_rejected(pairs)
    expected = [-log_sigmoid(beta * w - beta * l - gamma) for w, l in pairs]  # noqa: E741
    same(preferences.simpo(chosen - rejected, beta, gamma), expected)


@given(PAIRS, BETA)
def test_orpo_is_the_likelihood_and_the_odds_ratio(pairs, beta):
    def odds(logp):
        return math.exp(logp) / (1 - math.exp(logp))

    expected = [-w - beta * log_sigmoid(math.log(odds(w) / odds(l))) for w, l in pairs]  # noqa: E741
    same(preferences.orpo(*chosen_and_rejected(pairs), beta), expected)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-9, 0)), max_size=20))
def test_the_positions_of_an_answer_are_added_up(positions):
    answer = torch.tensor([whose for whose, _ in positions], dtype=torch.int64)
    logps = torch.tensor([logp for _, logp in positions], dtype=torch.float64, requires_grad=True)
    found = preferences.sums_of_answers(logps, answer, 5)
    assert found.tolist() == pytest.approx(
        [sum(logp for whose, logp in positions if whose == index) for index in range(5)]
    )
    found[3].backward()
    assert logps.grad.tolist() == [float(whose == 3) for whose, _ in positions]
