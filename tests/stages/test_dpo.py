"""Pairs of answers to a loss, against a loop over pairs, and what it says of itself."""

import math

import pytest
import torch

from surefoot.batch import IGNORE_INDEX, Outputs
from surefoot.data.text.collation import join
from surefoot.errors import RecipeError
from surefoot.schema import read
from surefoot.stages import DPO

PAIRS = [  # lengths of prompt, chosen, rejected; the reference's log-probabilities
    (3, 4, 2, (-4.0, -2.5)),
    (5, 1, 3, (-1.25, -3.0)),
    (1, 2, 2, (-6.0, -5.0)),
]


def items(with_reference=True):
    found = []
    for prompt, chosen, rejected, said in PAIRS:
        head = list(range(10, 10 + prompt))
        both = [
            {"input_ids": head + answer, "labels": [IGNORE_INDEX] * prompt + answer}
            for answer in (list(range(30, 30 + chosen)), list(range(50, 50 + rejected)))
        ]
        found.append(join(*both) | ({"reference": said} if with_reference else {}))
    return found


def outputs(batch, seed=0):
    torch.manual_seed(seed)
    logps = -torch.rand(batch.num_trained, dtype=torch.float64) - 0.1
    return Outputs(logps.requires_grad_())


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def smoothed(c, r, e, _):
    return -(1 - e) * log_sigmoid(c - r) - e * log_sigmoid(r - c)


# Of the rewards of chosen and rejected, the smoothing, and beta: as in TRL's DPOTrainer.
OTHERS = {
    "sigmoid_norm": smoothed,
    "cpo": smoothed,
    "robust": lambda c, r, e, _: (
        (-(1 - e) * log_sigmoid(c - r) + e * log_sigmoid(r - c)) / (1 - 2 * e)
    ),
    "exo_pair": lambda c, r, e, _: (
        sigmoid(c - r) * (log_sigmoid(c - r) - math.log(1 - e))
        + sigmoid(r - c) * (log_sigmoid(r - c) - math.log(e))
    ),
    "apo_zero": lambda c, r, *_: 1 - sigmoid(c) + sigmoid(r),
    "apo_down": lambda c, r, *_: sigmoid(c) + 1 - sigmoid(c - r),
    "nca_pair": lambda c, r, *_: -log_sigmoid(c) - 0.5 * log_sigmoid(-c) - 0.5 * log_sigmoid(-r),
    "bco_pair": lambda c, r, *_: -log_sigmoid(c) - log_sigmoid(-r),
    "sppo_hard": lambda c, r, _, b: (c / b - 0.5 / b) ** 2 + (r / b + 0.5 / b) ** 2,
}


SMOOTHED = ("sigmoid_norm", "cpo", "robust", "exo_pair")


def by_hand(stage, logps, answer):
    """Sum over pairs of the loss and of each metric, in plain floats."""
    loss, metrics = 0.0, {}
    for index, (_, chosen, rejected, said) in enumerate(PAIRS):
        sums = [
            sum(p for p, whose in zip(logps, answer, strict=True) if whose == 2 * index + side)
            for side in (0, 1)
        ]
        means = [sums[0] / chosen, sums[1] / rejected]
        mean_said = [said[0] / chosen, said[1] / rejected]
        told = means if stage.loss_type in ("ipo", "sigmoid_norm", "orpo", "simpo") else sums
        if stage.loss_type in ("ipo", "sigmoid_norm"):
            relative = [a - b for a, b in zip(means, mean_said, strict=True)]
        elif stage.compares:
            relative = [a - b for a, b in zip(sums, said, strict=True)]
        else:
            relative = sums if stage.loss_type == "cpo" else means
        margin, smooth = relative[0] - relative[1], stage.label_smoothing
        loss += stage.sft_weight * -means[0]
        if stage.loss_type in OTHERS:
            loss += OTHERS[stage.loss_type](*(stage.beta * r for r in relative), smooth, stage.beta)
            loss -= means[0] if stage.loss_type == "cpo" else 0
        elif stage.loss_type == "sigmoid":
            loss -= (1 - smooth) * log_sigmoid(stage.beta * margin)
            loss -= smooth * log_sigmoid(-stage.beta * margin)
        elif stage.loss_type == "hinge":
            loss += max(0.0, 1 - stage.beta * margin)
        elif stage.loss_type == "ipo":
            loss += (margin - 1 / (2 * stage.beta)) ** 2
        elif stage.loss_type == "simpo":
            loss -= log_sigmoid(stage.beta * margin - stage.gamma)
        else:
            odds = [math.exp(p) / (1 - math.exp(p)) for p in means]
            loss -= means[0] + stage.beta * log_sigmoid(math.log(odds[0] / odds[1]))
        rewards = [stage.beta * value for value in relative]
        found = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": float(rewards[0] > rewards[1]),
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": told[0],
            "logps/rejected": told[1],
        }
        if stage.sft_weight or stage.loss_type in ("orpo", "cpo"):
            found["sft_loss"] = -means[0]
        metrics = {name: metrics.get(name, 0.0) + value for name, value in found.items()}
    return loss, metrics


STAGES = [
    DPO(),
    DPO(beta=0.5, label_smoothing=0.2, sft_weight=0.3),
    DPO(loss_type="hinge", beta=0.3),
    DPO(loss_type="ipo"),
    DPO(loss_type="orpo"),
    DPO(loss_type="simpo", beta=2.0, gamma=1.0),
    *(
        DPO(loss_type=name, beta=0.4, label_smoothing=0.1 if name in SMOOTHED else 0.0)
        for name in OTHERS
    ),
]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_the_loss_is_that_of_a_loop_over_pairs(stage, packing):
    batch = stage.collate(items(), packing=packing)
    said = outputs(batch)
    loss = stage.loss("policy", said, batch)
    expected, metrics = by_hand(stage, said.logps.tolist(), batch.extras["answer"].tolist())
    assert loss.total.item() == pytest.approx(expected, rel=1e-6)
    assert loss.weight == len(PAIRS)
    assert {name: value.item() for name, value in loss.metrics.items()} == pytest.approx(
        metrics, rel=1e-6
    )
    assert not any(value.requires_grad for value in loss.metrics.values())


def test_losses_are_mixed_by_their_weights():
    mixed = DPO(losses={"sigmoid": 0.8, "bco_pair": 0.2, "simpo": 0.5}, gamma=0.3)
    batch = mixed.collate(items(), packing=True)
    said = outputs(batch)
    parts = [
        0.8 * DPO().loss("policy", said, batch).total,
        0.2 * DPO(loss_type="bco_pair").loss("policy", said, batch).total,
        0.5 * DPO(loss_type="simpo", gamma=0.3).loss("policy", said, batch).total,
    ]
    torch.testing.assert_close(mixed.loss("policy", said, batch).total, sum(parts))
    assert mixed.compares
    assert not DPO(losses={"simpo": 1.0, "orpo": 1.0}).compares


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_tokens_by_which_a_response_is_longer_count_less(packing, loss_type):
    """LD-DPO as in TRL's DPOTrainer: what both responses have counts in full, the rest ``ld_alpha``
    times, of policy and reference."""
    stage, tails = DPO(loss_type=loss_type, ld_alpha=0.3, sft_weight=0.5), [-1.5, -0.5, -2.0]
    given = [
        {**item, "reference_tail": [tail * (c > r), tail * (r > c)]}
        for item, tail, (_, c, r, _) in zip(items(), tails, PAIRS, strict=True)
    ]
    batch = stage.collate(given, packing=packing)
    said = outputs(batch)
    logps, expected, at = said.logps.tolist(), 0.0, 0
    for (_, chosen, rejected, sums), tail in zip(PAIRS, tails, strict=True):
        parts = []
        for count, other, whole in ((chosen, rejected, sums[0]), (rejected, chosen, sums[1])):
            mine = logps[at : at + count]
            shared = min(chosen, rejected)
            ours = sum(mine[:shared]) + 0.3 * sum(mine[shared:])
            theirs = whole - 0.7 * tail if count > other else whole
            parts.append((ours - theirs) / (count if loss_type == "ipo" else 1))
            expected -= 0.5 * sum(mine) / count if not parts[1:] else 0
            at += count
        margin = parts[0] - parts[1]
        expected += (margin - 5) ** 2 if loss_type == "ipo" else -log_sigmoid(0.1 * margin)
    loss = stage.loss("policy", said, batch).detach()
    assert float(loss.total) == pytest.approx(expected, rel=1e-6)


def test_the_reference_of_a_tail_is_that_of_its_tokens():
    batch = DPO().collate(items(with_reference=False), packing=True)
    said = outputs(batch)
    found = DPO().sums(said, batch)
    logps, wanted, at = said.logps.tolist(), [], 0
    for _, *counts, _ in PAIRS:
        for count in counts:
            wanted.append(sum(logps[at + min(counts) : at + count]))
            at += count
    assert found[:, 1].flatten().tolist() == pytest.approx(wanted)
    assert found[:, 0].tolist() == DPO().answers(said, batch).tolist()


def test_where_policy_and_reference_agree_the_loss_is_ln_2_and_no_reward_is_given():
    stage = DPO()
    batch = stage.collate(items(with_reference=False), packing=True)
    said = outputs(batch)
    batch.extras["reference"] = stage.answers(said, batch).detach().flatten()
    loss = stage.loss("policy", said, batch)
    assert loss.total.item() == pytest.approx(len(PAIRS) * math.log(2))
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert loss.metrics[f"rewards/{name}"] == 0


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_a_pair_without_labels_counts_nothing(stage):
    blank = {**items()[0], "labels": [IGNORE_INDEX] * 9}
    batch = stage.collate([blank], packing=True)
    logps = torch.zeros(0, requires_grad=True)
    loss = stage.loss("policy", Outputs(logps), batch)
    loss.total.backward()  # all processes run backward
    assert loss.total == loss.weight == 0
    assert all(value == 0 for value in loss.metrics.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, "beta: must be positive, got 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing: must be in \[0, 0.5\), got 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing has no effect with .* ipo"),
        ({"gamma": -1, "loss_type": "simpo"}, "gamma: must not be negative, got -1"),
        ({"gamma": 1}, "gamma has no effect with loss_type: sigmoid"),
        ({"sft_weight": -1}, "sft_weight: must not be negative, got -1"),
        ({"ld_alpha": 2}, "ld_alpha: must be in"),
        ({"ld_alpha": 0.5, "loss_type": "simpo"}, "ld_alpha has no effect with simpo"),
        ({"reference": "x", "loss_type": "orpo"}, "reference has no effect with loss_type: orpo"),
        ({"loss_type": "sigmod"}, "did you mean sigmoid"),
        ({"loss_type": "exo_pair"}, "label_smoothing: exo_pair needs a positive one"),
        ({"losses": {"sigmod": 1}}, "losses: expected some of sigmoid, .*, got 'sigmod'"),
        ({"losses": {"hinge": 0}}, "losses: the weight of hinge must be positive, got 0"),
        (
            {"losses": {"ipo": 1}, "loss_type": "hinge"},
            "loss_type: hinge has no effect with losses",
        ),
        ({"losses": {"ipo": 1}, "gamma": 1}, "gamma has no effect with losses: ipo"),
    ],
    ids=str,
)
def test_a_setting_that_means_nothing_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        read(DPO, settings)
