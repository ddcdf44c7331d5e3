"""Losses of grpo against loops over their formulas in plain Python, and against TRL's."""

import math

import pytest
import torch

from stage_data import stage_of
from surefoot.batch import Outputs
from surefoot.training.policy_gradient import ADVANTAGES, KL

LENGTHS = (3, 1, 4, 2)
COUNT = sum(LENGTHS)
ADVANTAGES_OF = (0.8, -0.5, -1.3, 0.4)  # of each response
RANDOM = torch.Generator().manual_seed(3)
OLD = -2 * torch.rand(COUNT, dtype=torch.float64, generator=RANDOM)
LOGPS = OLD + 0.6 * torch.randn(COUNT, dtype=torch.float64, generator=RANDOM)
LOGPS[0] += 1.6  # a ratio over 5
LOGPS[6] += 2.0  # one over 3 of a negative advantage
REFERENCE = OLD + 0.3 * torch.randn(COUNT, dtype=torch.float64, generator=RANDOM)
KINDS = {
    "clip": {},
    "clip_higher": {"clip": 0.2, "clip_high": 0.28},
    "dual_clip": {"surrogate": "dual_clip"},
    "cispo": {"surrogate": "cispo"},
    "gspo": {"surrogate": "gspo", "clip": 0.1, "clip_high": 0.15},
    "sapo": {"surrogate": "sapo"},
}
WHERE = ("responses", "tokens", "max_new_tokens")


def items():
    """The responses, each after a prompt of two tokens."""
    found, at = [], 0
    for length, advantage in zip(LENGTHS, ADVANTAGES_OF, strict=True):
        part = slice(at, at + length)
        found.append(
            {
                "input_ids": [1, 2, *range(10, 10 + length)],
                "labels": [-100, -100, *range(10, 10 + length)],
                "advantages": [advantage] * length,
                "old": OLD[part].tolist(),
                "reference": REFERENCE[part].tolist(),
            }
        )
        at += length
    return found


def token_gain(name, stage, ratio, advantage, logp, fixed_ratio):
    """What a surrogate gives for one token; ``fixed_ratio`` has no gradient."""
    low, high = stage.bounds
    if name == "cispo":
        return min(fixed_ratio, 1 + high) * advantage * logp
    if name == "sapo":
        t = 1.0 if advantage > 0 else 1.05
        return 4 / t / (1 + math.exp(-t * (ratio - 1))) * advantage
    gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if name == "dual_clip" and advantage < 0:
        return max(gain, 3.0 * advantage)
    return gain


def loop(name, stage, logps, constants):
    """The loss of an optimizer step; ``constants`` are log-probabilities without a gradient."""
    rows, at, number = [], 0, 0
    for length, advantage in zip(LENGTHS, ADVANTAGES_OF, strict=True):
        part = range(at, at + length)
        whole = math.exp(sum(logps[i] - float(OLD[i]) for i in part) / length)
        row = []
        for i in part:
            own = math.exp(logps[i] - float(OLD[i]))
            ratio = whole if name == "gspo" else own
            fixed = math.exp(constants[i] - float(OLD[i]))
            gain = token_gain(name, stage, ratio, advantage, logps[i], fixed)
            if stage.beta:
                far = logps[i] - float(REFERENCE[i])
                kl = far if stage.kl_estimator == "k1" else math.exp(-far) + far - 1
                gain -= stage.beta * own * kl
            row.append(gain)
        rows.append(row)
        at, number = at + length, number + 1
    if stage.average_over == "tokens":
        return -sum(map(sum, rows)) / COUNT
    if stage.average_over == "max_new_tokens":
        return -sum(map(sum, rows)) / (len(rows) * stage.max_new_tokens)
    return -sum(sum(row) / len(row) for row in rows) / len(rows)


def loss_of(stage, logps, *, packing=True, parts=1):
    """The same by the stage, in so many micro-batches."""
    every, found, at = items(), [], 0
    for start in range(0, len(every), len(every) // parts):
        batch = stage.collate(every[start : start + len(every) // parts], packing=packing)
        some = logps[at : at + batch.num_trained]
        found.append(stage.loss("policy", Outputs(logps=some), batch))
        at += batch.num_trained
    return sum(one.total for one in found) / sum(one.weight for one in found)


@pytest.mark.parametrize("average", WHERE)
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradient_are_those_of_the_formula(name, average):
    estimator = "k1" if name in ("clip", "gspo") else "k3"
    more = {"beta": 0.3, "kl_estimator": estimator}
    stage = stage_of("grpo", **KINDS[name], **more, average_over=average)
    logps = LOGPS.clone().requires_grad_()
    loss = loss_of(stage, logps)
    plain = LOGPS.tolist()
    assert loss.item() == pytest.approx(loop(name, stage, plain, plain), rel=1e-12)
    (slopes,) = torch.autograd.grad(loss, logps)
    for i in range(COUNT):
        up, down = (
            loop(name, stage, [x + step * (n == i) for n, x in enumerate(plain)], plain)
            for step in (1e-6, -1e-6)
        )
        assert slopes[i].item() == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("average", WHERE)
@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_depends_on_no_micro_batch(average, packing):
    stage = stage_of("grpo", surrogate="gspo", clip=0.1, beta=0.1, average_over=average)
    whole = loss_of(stage, LOGPS)
    for parts in (2, 4):
        found = loss_of(stage, LOGPS, packing=packing, parts=parts)
        assert float(found) == pytest.approx(float(whole), rel=1e-12)


def test_on_policy_the_gradient_is_that_of_reinforce():
    for name, settings in KINDS.items():
        stage = stage_of("grpo", **settings, average_over="tokens", beta=0.0)
        logps = OLD.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(loss_of(stage, logps), logps)
        expected = []
        for length, advantage in zip(LENGTHS, ADVANTAGES_OF, strict=True):
            expected += [-advantage / COUNT] * length
        assert slopes.tolist() == pytest.approx(expected, rel=1e-12), name


def test_a_kl_penalty_alone_has_the_gradient_of_the_divergence():
    """Over all actions of a softmax of three, weighted by their probabilities."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2], dtype=torch.float64).log_softmax(0)
    logps = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logps.exp() * (logps - reference)).sum(), logits)
    for estimate in KL.values():
        logps = logits.log_softmax(0)
        old = logps.detach()
        (found,) = torch.autograd.grad((old.exp() * estimate(logps, reference, old)).sum(), logits)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


GROUPS = [[1.0, 0.0, None, 0.25], [0.1, 0.1, 0.1, 0.1], [2.0, -1.0, 0.0, 0.5]]
TOKENS = [3, 1, 7, 2, 5, 5, 5, 5, 1, 2, 3, 4]


def test_advantages_are_those_of_their_papers():
    found = {name: function(GROUPS, TOKENS) for name, function in ADVANTAGES.items()}
    assert found["rloo"][0] == pytest.approx(1.0 - (0.0 + 0.25) / 2)
    assert found["rloo"][8] == pytest.approx(2.0 - (-1.0 + 0.0 + 0.5) / 3)
    assert found["dr_grpo"][0] == pytest.approx(1.0 - 1.25 / 3)
    spread = torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64).std().item()
    assert found["group"][0] == pytest.approx((1.0 - 1.25 / 3) / (spread + 1e-4))
    for name in ("group", "dr_grpo", "rloo"):
        assert found[name][2] == 0
        assert found[name][4:8] == [0.0] * 4
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        known = [i for i in range(12) if i != 2]
        each = torch.tensor(
            [found[name][i] for i in known for _ in range(TOKENS[i])], dtype=torch.float64
        )
        assert each.mean().item() == pytest.approx(0, abs=1e-12)
        assert each.std(correction=0).item() == pytest.approx(1)
        assert found[name][2] == 0
    gains = [g for i, g in enumerate(found["reinforce_plus_plus"]) if i != 2]
    assert (gains[3] - gains[1]) / (gains[0] - gains[1]) == pytest.approx(0.1)


def test_equal_rewards_give_no_advantage_however_they_are_rounded():
    for name, function in ADVANTAGES.items():
        assert function([[0.1] * 3, [0.1] * 3], [1] * 6) == [0.0] * 6, name
