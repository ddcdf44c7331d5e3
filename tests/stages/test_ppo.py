"""PPO against loops over its formulas, in float64, and against what is known in closed form."""

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from stage_data import stage_of
from surefoot.batch import Outputs
from surefoot.data.section import DataSection
from surefoot.errors import RecipeError, RunError
from surefoot.generate.generation import Sample
from surefoot.parallel.section import ParallelSection
from surefoot.schema import read
from surefoot.stages._ppo import PPO, REFERENCE
from surefoot.training.rewards import Rewarded

PROMPTS = [
    {"input_ids": [5, 6, i], "labels": [-100] * 3, "row": json.dumps({"gold": i}).encode()}
    for i in range(6)
]
PLAIN = {
    "normalize_scores": False,
    "kl_target": None,
    "kl_horizon": 10_000,
    "whiten_rewards": False,
    "gamma": 0.9,
    "kl_coefficient": 0.1,
}


@dataclass
class Rollouts:
    """A context that answers with as many tokens as the number of the prompt says; everything that
    a model computes is a number between 0 and 1, of the token and the role."""

    rewards: list
    state: dict = field(default_factory=dict)
    ends: list = field(default_factory=list)
    computed: list = field(default_factory=list)

    def generate(self, prompts, settings, *, turn=0):
        reasons = self.ends or ["stop"] * len(prompts)
        counts = [1 + number % 4 for number in range(len(prompts))]
        return [
            Sample(tuple(range(10, 10 + n)), (0.0,) * n, reason)
            for n, reason in zip(counts, reasons, strict=True)
        ]

    def reward(self, rewards, rollouts, seconds, on_error):
        assert [one.row.columns["gold"] for one in rollouts] == list(range(len(rollouts)))
        return Rewarded([self.rewards])

    def compute(self, role, examples):
        self.computed.append(role)
        found = []
        for item in examples:
            tokens = [i + item["input_ids"][2] for i, x in enumerate(item["labels"]) if x >= 0]
            place = torch.tensor(tokens, dtype=torch.float64)
            if role == REFERENCE:
                found.append(Outputs(logps=-1 - place.cos() / 4))
            else:
                found.append(Outputs(logps=-1 - place.sin() / 2, values=place.cos()))
        return found


def columns(items):
    names = ("old", "old_values", "advantages", "returns")
    return {name: [np.asarray(item[name]) for item in items] for name in names}


def loop(stage, context, items, scores, beta):
    """Advantages before whitening and returns, of each token in turn."""
    advantages, returns = [], []
    reference = Rollouts([]).compute(REFERENCE, items)
    policy = Rollouts([]).compute("policy", items)
    for own, other, score in zip(policy, reference, scores, strict=True):
        kls = (own.logps - other.logps).tolist()
        if stage.kl_estimator == "k3":
            kls = [math.exp(-x) - 1 + x for x in kls]
        rewards = [-beta * kl for kl in kls]
        rewards[-1] += score
        values = [*own.values.tolist(), 0.0]
        errors = [r + stage.gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        discount = stage.gamma * stage.gae_lambda
        found = [
            sum(discount**k * error for k, error in enumerate(errors[t:]))
            for t in range(len(errors))
        ]
        advantages += found
        returns += [a + v for a, v in zip(found, values, strict=False)]
    return advantages, returns


@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_window_is_that_of_the_formula(whiten, kl_estimator):
    stage = stage_of(
        "ppo", **PLAIN, whiten_advantages=whiten, kl_estimator=kl_estimator, gae_lambda=0.8
    )
    context = Rollouts([1.0, 0.5, 0.0, 2.0, 0.25, -1.0])
    window = stage.prepare(context, PROMPTS)
    found = columns(window.examples)
    advantages, returns = loop(stage, context, window.examples, context.rewards, 0.1)
    if whiten:
        mean, spread = np.mean(advantages), np.std(advantages, ddof=1)
        advantages = [(a - mean) / math.sqrt(spread**2 + 1e-8) for a in advantages]
    assert np.concatenate(found["advantages"]) == pytest.approx(advantages, rel=1e-10, abs=1e-10)
    assert np.concatenate(found["returns"]) == pytest.approx(returns, rel=1e-10, abs=1e-10)
    assert window.figures["reward"] == pytest.approx(2.75 / 6)
    assert window.figures["kl_coefficient"] == 0.1
    assert context.computed == ["policy", REFERENCE]


def test_without_a_penalty_there_is_no_reference():
    stage = stage_of("ppo", **{**PLAIN, "kl_coefficient": 0.0})
    assert not stage.auxiliary
    context = Rollouts([1.0, 0.5, 0.0, 2.0, 0.25, -1.0])
    window = stage.prepare(context, PROMPTS)
    assert context.computed == ["policy"]
    assert "kl" not in window.figures


def test_the_first_step_has_the_gradient_of_reinforce():
    stage = stage_of("ppo", **PLAIN, value_coefficient=0.0)
    window = stage.prepare(Rollouts([1.0, 0.5, 0.0, 2.0, 0.25, -1.0]), PROMPTS)
    batch = stage.collate(window.examples, packing=True)
    old = torch.from_numpy(np.concatenate(columns(window.examples)["old"]))
    logps, values = old.clone().requires_grad_(), torch.zeros_like(old)
    loss = stage.loss("policy", Outputs(logps=logps, values=values), batch)
    (slopes,) = torch.autograd.grad(loss.total, logps)
    advantages = np.concatenate(columns(window.examples)["advantages"])
    torch.testing.assert_close(slopes, torch.from_numpy(-advantages))
    assert loss.metrics["clip_ratio"] == 0 == loss.metrics["policy_kl"]


def test_scores_are_normalized_by_all_scores_so_far_then_clipped_and_penalized():
    stage = stage_of(
        "ppo", **{**PLAIN, "normalize_scores": True, "kl_coefficient": 0.0, "gamma": 1.0},
        clip_scores=1.0, missing_end_penalty=0.5, whiten_advantages=False, gae_lambda=1.0,
    )  # fmt: skip
    state, seen = {}, []
    for rewards in ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.0, 9.0, 1.0, 1.0, 1.0]):
        seen += rewards
        ends = ["stop"] * 5 + ["length"]
        window = stage.prepare(Rollouts(rewards, state, ends), PROMPTS)
        state = window.state
        expected = (np.array(rewards) - np.mean(seen)) / np.std(seen, ddof=1)
        expected = expected.clip(-1, 1)
        expected[-1] -= 0.5
        found = [returns[0] for returns in columns(window.examples)["returns"]]
        assert found == pytest.approx(expected, rel=1e-6)
    assert window.figures["completions_clipped"] == pytest.approx(1 / 6)


def test_rewards_of_tokens_are_scaled_over_the_whole_window():
    settings = {**PLAIN, "gamma": 1.0, "whiten_advantages": False, "gae_lambda": 1.0}
    rewards, found = [1.0, 0.5, 0.0, 2.0, 0.25, -1.0], {}
    for is_white in (False, True):
        stage = stage_of("ppo", **{**settings, "whiten_rewards": is_white})
        window = stage.prepare(Rollouts(rewards), PROMPTS)
        to_go = columns(window.examples)["returns"]
        found[is_white] = np.concatenate([one - np.append(one[1:], 0) for one in to_go])
    plain = found[False]
    expected = (plain - plain.mean()) / plain.std(ddof=1) + plain.mean()
    assert found[True] == pytest.approx(expected, rel=1e-6)


def test_the_coefficient_adapts_from_window_to_window():
    stage = stage_of("ppo", **{**PLAIN, "kl_target": 0.5, "kl_horizon": 10})
    context = Rollouts([1.0, 0.5, 0.0, 2.0, 0.25, -1.0])
    first = stage.prepare(context, PROMPTS)
    context.state = first.state
    second = stage.prepare(context, PROMPTS)
    error = min(max(first.figures["kl"] / 0.5 - 1, -0.2), 0.2)
    assert second.figures["kl_coefficient"] == pytest.approx(0.1 * (1 + error * 6 / 10))


def test_a_response_without_a_reward_is_left_out():
    context = Rollouts([1.0, None, 0.0, 2.0, None, -1.0])
    window = stage_of("ppo", **PLAIN).prepare(context, PROMPTS)
    assert [item["input_ids"][2] for item in window.examples] == [0, 2, 3, 5]
    assert window.figures["reward"] == 0.5
    context = Rollouts([None] * 6, {"kl_coefficient": 3.0})
    window = stage_of("ppo", **PLAIN).prepare(context, PROMPTS)
    assert not window.examples
    assert window.state == context.state


def test_equal_scores_are_not_whitened_into_noise_and_end_a_run_that_never_had_others():
    stage, state = stage_of("ppo", **PLAIN), {}
    for _ in range(9):
        window = stage.prepare(Rollouts([0.0] * 6, state), PROMPTS)
        plain, _ = loop(stage, None, window.examples, [0.0] * 6, 0.1)
        found = np.concatenate(columns(window.examples)["advantages"])
        assert found == pytest.approx(plain)
        state = window.state
    varied = stage.prepare(Rollouts([0.0] * 5 + [1.0], state), PROMPTS).state
    with pytest.raises(RunError, match="all scores of the first 10 windows were equal"):
        stage.prepare(Rollouts([0.0] * 6, state), PROMPTS)
    alone = state
    for _ in range(20):  # a window of one response
        alone = stage.prepare(Rollouts([0.0], alone), PROMPTS[:1]).state
    for _ in range(20):
        varied = stage.prepare(Rollouts([1.0] * 6, varied), PROMPTS).state


class Bandit:
    """A policy of one token: its logits, and the value of the only state."""

    def __init__(self, rewards, reference):
        self.rewards, self.reference = rewards, torch.tensor(reference).log()
        self.logits = self.reference.clone().requires_grad_()
        self.value = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.random = np.random.default_rng(0)
        self.state = {}

    def generate(self, prompts, settings, *, turn=0):
        chances = self.logits.detach().softmax(0).numpy()
        arms = self.random.choice(len(chances), len(prompts), p=chances)
        return [Sample((int(arm),), (0.0,), "stop") for arm in arms]

    def reward(self, rewards, rollouts, seconds, on_error):
        return Rewarded([[self.rewards[one.completion[0]] for one in rollouts]])

    def compute(self, role, examples):
        arms = torch.tensor([item["labels"][-1] for item in examples])
        logps = (self.logits.detach() if role == "policy" else self.reference).log_softmax(0)
        values = self.value.detach().expand(1)
        return [Outputs(logps=logp[None], values=values) for logp in logps[arms]]

    def outputs(self, arms):
        return Outputs(logps=self.logits.log_softmax(0)[arms], values=self.value.expand(len(arms)))


def test_a_bandit_reaches_its_known_optimum():
    """With a penalty b the best policy is proportional to ``reference * e^(reward / b)``."""
    bandit = Bandit([1.0, 0.0, 0.5], torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).tolist())
    stage = stage_of(
        "ppo", **{**PLAIN, "kl_coefficient": 0.5}, whiten_advantages=False, value_clip=None,
        value_coefficient=1.0,
    )  # fmt: skip
    prompts = [{"input_ids": [0], "labels": [-100], "row": b"{}"}] * 500
    for window in range(30):
        items = stage.prepare(bandit, prompts).examples
        batch = stage.collate(items, packing=True)
        arms = torch.tensor([item["labels"][-1] for item in items])
        for _ in range(2):
            loss = stage.loss("policy", bandit.outputs(arms), batch)
            slopes = torch.autograd.grad(loss.total / loss.weight, [bandit.logits, bandit.value])
            with torch.no_grad():
                bandit.logits -= (2.0 if window < 20 else 0.5) * slopes[0]
                bandit.value -= 0.5 * slopes[1]
    best = np.array([0.2, 0.5, 0.3]) * np.exp(np.array([1.0, 0.0, 0.5]) / 0.5)
    found = bandit.logits.detach().softmax(0).numpy()
    assert found == pytest.approx(best / best.sum(), abs=0.02)
    assert float(bandit.value.detach()) == pytest.approx(0.5 * math.log(best.sum()), abs=0.02)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "reward"),
        ({"reward": []}, "reward: expected at least one"),
        ({"reward": "no function"}, "reward"),
        ({"reward": "r.py:f", "reward_timeout": 0}, "reward_timeout: must be positive"),
        ({"reward": "r.py:f", "clip": 1}, "clip: must be between 0 and 1"),
        ({"reward": "r.py:f", "gae_lambda": 1.5}, "gae_lambda: must be from 0 to 1"),
        ({"reward": "r.py:f", "value_clip": 0}, "value_clip: must be positive"),
        ({"reward": "r.py:f", "kl_coefficient": 0, "kl_target": 6}, "kl_target"),
        (
            {"reward": "r.py:f", "missing_end_penalty": -1},
            "missing_end_penalty: must not be negative",
        ),
        ({"reward": "r.py:f", "kl_horizon": 5}, "kl_horizon has no effect"),
        ({"reward": "r.py:f", "kl_coefficient": 0, "reference": "x"}, "reference has no effect"),
        ({"reward": "r.py:f", "passes": 0}, "passes: must be at least 1"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings, word):
    with pytest.raises(RecipeError, match=word):
        read(PPO, settings)


def test_heads_are_not_sharded_along_tp_and_pp():
    stage, data = stage_of("ppo"), DataSection(datasets=("any",), mask_history=True)
    found = [str(one) for one in stage.problems(data, ParallelSection(tp=2, pp=2))]
    assert len(found) == 3
    assert all(name in text for name, text in zip(("mask", "tp", "pp"), found, strict=True))
