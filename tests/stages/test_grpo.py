"""GRPO against a loop over its formula, in float64; rewards, groups and windows left out."""

import json
import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from stage_data import stage_of
from surefoot.batch import Outputs
from surefoot.data.example import Example, Message
from surefoot.errors import RecipeError
from surefoot.generate.generation import Sample
from surefoot.generate.servers import VLLM
from surefoot.schema import read
from surefoot.stages import GRPO
from surefoot.training.rewards import Rewarded
from surefoot.training.rollout import DatasetRow, read_row

PROMPTS = [
    {"input_ids": [5, 6, i], "labels": [-100] * 3, "row": json.dumps({"gold": i}).encode()}
    for i in range(3)
]


@dataclass
class Rollouts:
    """A context that answers with as many tokens as the number of the prompt says."""

    rewards: list
    seen: dict = field(default_factory=dict)
    cut: tuple = ()  # numbers of the responses that do not end
    sampled: tuple = (0.0,)  # log-probabilities of the tokens of a response
    reference: tuple = (-1.5,)  # the same by the reference

    def generate(self, prompts, settings, turn=0):
        self.seen["settings"] = settings
        found = []
        for number, _ in enumerate(prompts):
            ids = tuple(range(10, 11 + number % 4))
            reason = "length" if number in self.cut else "stop"
            found.append(Sample(ids, np.resize(self.sampled, len(ids)), reason))
        return found

    def reward(self, rewards, rollouts, seconds, on_error):
        self.seen["rows"] = [one.row.columns for one in rollouts]
        return Rewarded([self.rewards for _ in rewards])

    def compute(self, role, examples, spec=None):
        counts = [sum(label >= 0 for label in item["labels"]) for item in examples]
        logps = self.reference if role == "reference" else (-1.5,)
        return [Outputs(logps=torch.from_numpy(np.resize(logps, n))) for n in counts]


def loop(stage, logps, window):
    """The sum of losses of all answers."""
    total, at, logps = 0.0, 0, logps.detach()
    for item in window:
        count = sum(label >= 0 for label in item["labels"])
        gains = []
        for token, advantage in zip(range(at, at + count), item["advantages"], strict=True):
            ratio = math.exp(float(logps[token]) + 1.5)
            near = min(max(ratio, 0.8), 1.2)
            gains.append(min(ratio * advantage, near * advantage))
        total -= sum(gains) / count
        at += count
    return total


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_is_that_of_the_formula(packing):
    stage, rewards = stage_of("grpo", beta=0.0), [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 3.0, None, 1.0]
    context = Rollouts(rewards)
    window = stage.prepare(context, PROMPTS)
    assert window.figures["reward"] == pytest.approx(5.5 / 8)
    assert window.figures["flat_groups"] == pytest.approx(1 / 3)
    assert context.seen["rows"] == [{"gold": i} for i in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert context.seen["settings"].do_sample
    spread = np.std([1, 0.5, 0], ddof=1) + 1e-4
    assert [item["advantages"][0] for item in window.examples[:3]] == pytest.approx(
        [0.5 / spread, 0, -0.5 / spread]
    )
    assert [item["advantages"][0] for item in window.examples[3:6]] == [0, 0, 0]
    assert window.examples[7]["advantages"][0] == 0  # it has no reward
    batch = stage.collate(window.examples, packing=packing)
    count = sum(len(item["advantages"]) for item in window.examples)
    logps = torch.linspace(-2, -1, count, dtype=torch.float64, requires_grad=True)
    loss = stage.loss("policy", Outputs(logps=logps), batch)
    assert float(loss.total.detach()) == pytest.approx(
        loop(stage, logps, window.examples), rel=1e-12
    )
    assert loss.weight == 9
    (slopes,) = torch.autograd.grad(loss.total, logps)
    for token in (0, 5, count - 1):
        near = [logps.detach().clone() for _ in range(2)]
        near[0][token] += 1e-6
        near[1][token] -= 1e-6
        up, down = (loop(stage, values, window.examples) for values in near)
        assert float(slopes[token]) == pytest.approx((up - down) / 2e-6, abs=1e-6)


CUTS = [(True, 1), (True, 3), (False, 2), (False, 4)]  # packing, micro-batches
REWARDS = [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 3.0, None, 1.0]


def loss_of(stage, items, logps, *, packing, parts):
    """The loss of an optimizer step of so many micro-batches."""
    found, at = [], 0
    for part in np.array_split(np.arange(len(items)), parts):
        batch = stage.collate([items[i] for i in part], packing=packing)
        some = logps[at : at + batch.num_trained]
        found.append(stage.loss("policy", Outputs(logps=some), batch))
        at += batch.num_trained
    return sum(one.total for one in found) / sum(one.weight for one in found)


def slopes_of(function, logps):
    """The gradient of a function of plain numbers, by differences."""
    found = []
    for token in range(len(logps)):
        up, down = (
            function([x + step * (i == token) for i, x in enumerate(logps.tolist())])
            for step in (1e-6, -1e-6)
        )
        found.append((up - down) / 2e-6)
    return found


def assert_is(formula, stage, examples, logps, kept):
    """The loss of ``kept``, some of ``logps``, and its gradient are the formula's, however cut."""
    expected, slopes = formula(logps.tolist()), slopes_of(formula, logps.detach())
    for packing, parts in CUTS:
        loss = loss_of(stage, examples, kept, packing=packing, parts=parts)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        (found,) = torch.autograd.grad(loss, logps, retain_graph=True)
        assert found.tolist() == pytest.approx(slopes, abs=1e-8)


def trls_loss(logps, lengths, advantages, average, beta, *, masked=(), sampled=(), most=2.0):
    """Of all responses by TRL's formula: ``completion_mask`` is 0 in ``masked`` responses, and
    tokens that were ``sampled`` with those log-probabilities have a weight."""
    sums, counts, at = [], [], 0
    for number, (length, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        each = 0.0
        for taken, logp in enumerate([] if number in masked else logps[at : at + length]):
            ratio = math.exp(logp + 1.5)
            near = min(max(ratio, 0.8), 1.2)
            kl = math.exp(-1.5 - logp) - (-1.5 - logp) - 1
            gain = min(ratio * advantage, near * advantage)
            if sampled:  # vllm_importance_sampling_mode: token_truncate
                gain *= min(math.exp(-1.5 - sampled[taken]), most)
            each += beta * ratio * kl - gain
        sums.append(each)
        counts.append(0 if number in masked else length)
        at += length
    if average == "tokens":  # dapo
        return sum(sums) / sum(counts)
    if average == "max_new_tokens":  # dr_grpo
        return sum(sums) / (len(sums) * 5)
    return sum(each / max(1, n) for each, n in zip(sums, counts, strict=True)) / len(sums)


@pytest.mark.parametrize("average", ["responses", "tokens", "max_new_tokens"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_masked_truncated_responses_give_no_loss_and_keep_their_place_where_trl_keeps_it(
    average, beta
):
    stage = stage_of("grpo", mask_truncated_completions=True, average_over=average, beta=beta)
    usual = stage_of("grpo", beta=beta).prepare(Rollouts(REWARDS), PROMPTS).examples
    lengths = [len(item["advantages"]) for item in usual]
    advantages = [item["advantages"][0] for item in usual]
    masked = (0, 3, 6)
    window = stage.prepare(Rollouts(REWARDS, cut=masked), PROMPTS)
    assert window.figures["completions_clipped"] == pytest.approx(1 / 3)
    logps = torch.linspace(-2, -1, sum(lengths), dtype=torch.float64, requires_grad=True)
    kept = logps
    if average == "tokens":  # they are not there at all
        is_kept = [n not in masked for n, length in enumerate(lengths) for _ in range(length)]
        kept = logps[torch.tensor(is_kept)]
    formula = partial(
        trls_loss,
        lengths=lengths,
        advantages=advantages,
        average=average,
        beta=beta,
        masked=masked,
    )
    assert_is(formula, stage, window.examples, logps, kept)


def test_a_window_in_which_only_cut_responses_differ_is_left_out_if_they_are_masked():
    rewards = [0.0] * 6 + [1.0, None, 0.0]
    for is_masked in (True, False):
        stage = stage_of("grpo", mask_truncated_completions=is_masked)
        window = stage.prepare(Rollouts(rewards, cut=(6, 8)), PROMPTS)
        assert bool(window.examples) == (not is_masked)


SERVER = VLLM(url="http://unset")
SAMPLED = (-1.4, -1.75, -3.0, -1.5)  # trained as -1.5: the third weighs more than 2


@pytest.mark.parametrize("average", ["responses", "tokens", "max_new_tokens"])
@pytest.mark.parametrize(("steps", "most"), [(1, 2.0), (2, 2.0), (2, 1.1)])
def test_tokens_that_a_server_sampled_have_trls_truncated_weights(average, steps, most):
    settings = {"sampler": SERVER, "average_over": average, "beta": 0.3, "passes": steps}
    weights = {} if most == 2.0 else {"max_sampling_weight": most}
    stage = stage_of("grpo", **settings, **weights, mini_batches=1)
    window = stage.prepare(Rollouts(REWARDS, sampled=SAMPLED), PROMPTS)
    advantages = [item["advantages"][0] for item in window.examples]
    lengths = [len(item["advantages"]) for item in window.examples]
    logps = torch.linspace(-2, -1, sum(lengths), dtype=torch.float64, requires_grad=True)
    formula = partial(
        trls_loss,
        lengths=lengths,
        advantages=advantages,
        average=average,
        beta=0.3,
        sampled=SAMPLED,
        most=most,
    )
    assert_is(formula, stage, window.examples, logps, logps)
    batch = stage.collate(window.examples, packing=True)
    meters = stage.loss("policy", Outputs(logps=logps), batch).metrics
    each = [[min(math.exp(-1.5 - x), most) for x in SAMPLED[:n]] for n in lengths]
    flat, whole = [w for row in each for w in row], [sum(row) / len(row) for row in each]
    mean = sum(flat) if average == "tokens" else sum(whole)
    assert meters["sampling_weight"].item() == pytest.approx(mean)
    assert 0 < meters["sampling_weight_capped"] < sum(lengths)


REFERENCE = (-1.2, -2.5, -1.0, -1.6)


def rloo_loss(logps, lengths, beta, masked, sampled):
    """TRL's RLOOTrainer: ``per_token_kl``, ``kl``, ``baselines`` and ``per_sequence_loss``."""
    kls = [sum(-1.5 - x for x in REFERENCE[:n]) for n in lengths]
    rewards = [
        None if reward is None else reward - beta * kl * (number not in masked)
        for number, (reward, kl) in enumerate(zip(REWARDS, kls, strict=True))
    ]
    losses, at = [], 0
    for number, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        start = number - number % 3
        others = [
            r for i in range(start, start + 3) if i != number and (r := rewards[i]) is not None
        ]
        advantage = (
            0.0 if reward is None or number in masked else reward - sum(others) / len(others)
        )
        ratio = math.exp(sum(logps[at : at + length]) + 1.5 * length)
        gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        if sampled:
            gain *= min(math.exp(sum(-1.5 - x for x in sampled[:length])), 2.0)
        losses.append(-gain)
        at += length
    return sum(losses) / len(losses)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("masked", [(), (0, 4)])
@pytest.mark.parametrize("sampled", [(), SAMPLED])
def test_rloo_is_trls(beta, masked, sampled):
    server = {"sampler": SERVER} if sampled else {}
    stage = stage_of(
        "grpo", surrogate="rloo", beta=beta, mask_truncated_completions=bool(masked), **server
    )
    context = Rollouts(REWARDS, cut=masked, sampled=sampled or (-1.5,), reference=REFERENCE)
    window = stage.prepare(context, PROMPTS)
    lengths = [len(item["advantages"]) for item in window.examples]
    if beta:
        kls = [sum(-1.5 - x for x in REFERENCE[:n]) for n in lengths]
        kept = [kl for number, kl in enumerate(kls) if number not in masked]
        assert window.figures["kl"] == pytest.approx(sum(kept) / 9)
        assert "reference" not in window.examples[0]
    assert window.figures["reward"] == pytest.approx(5.5 / 8)
    logps = torch.linspace(-2, -1, sum(lengths), dtype=torch.float64, requires_grad=True)
    formula = partial(rloo_loss, lengths=lengths, beta=beta, masked=masked, sampled=sampled)
    assert_is(formula, stage, window.examples, logps, logps)


@pytest.mark.parametrize(
    ("name", "value", "is_right"),
    [
        *[("advantage", "rloo", True), ("advantage", "dr_grpo", False)],
        *[("average_over", "tokens", False), ("kl_estimator", "k1", True)],
    ],
)
def test_rloo_decides_what_belongs_to_it(name, value, is_right):
    settings = {"reward": "r.py:f", "surrogate": "rloo", "beta": 0.1, name: value}
    if is_right:
        assert read(GRPO, settings).surrogate == "rloo"
    else:
        with pytest.raises(RecipeError, match=f"{name} is always .* with surrogate: rloo"):
            read(GRPO, settings)


def test_weights_are_for_servers_and_can_be_turned_off():
    for settings in ({}, {"sampler": SERVER, "max_sampling_weight": 0.0}):
        stage = stage_of("grpo", **settings, passes=1, mini_batches=1)
        window = stage.prepare(Rollouts(REWARDS, sampled=SAMPLED), PROMPTS)
        assert not {"old", "sampled"} & set(window.examples[0])
        batch = stage.collate(window.examples, packing=True)
        logps = torch.zeros(batch.num_trained)
        assert "sampling_weight" not in stage.loss("policy", Outputs(logps=logps), batch).metrics


def test_a_single_step_needs_no_old_probabilities():
    stage = stage_of("grpo", passes=1, mini_batches=1, beta=0.0)
    window = stage.prepare(Rollouts([float(i) for i in range(9)]), PROMPTS)
    assert all("old" not in item for item in window.examples)
    batch = stage.collate(window.examples, packing=True)
    logps = torch.randn(batch.num_trained, requires_grad=True)
    loss = stage.loss("policy", Outputs(logps=logps), batch)
    assert loss.metrics["clip_ratio"] == 0
    loss.total.backward()
    assert logps.grad.abs().sum() > 0


def test_a_window_whose_groups_are_all_alike_is_left_out_with_its_figures():
    rewards = [1.0] * 3 + [0.0] * 3 + [None, None, 2.0]
    window = stage_of("grpo", beta=0.0).prepare(Rollouts(rewards), PROMPTS)
    assert not window.examples
    assert window.figures["flat_groups"] == 1


def test_a_reference_pulls_at_flat_groups_too_unless_they_are_dropped():
    rewards = [1.0] * 3 + [0.0] * 3 + [0.0, 1.0, 2.0]
    prepared = {
        is_dropped: stage_of("grpo", drop_flat_groups=is_dropped).prepare(
            Rollouts(rewards), PROMPTS
        )
        for is_dropped in (False, True)
    }
    assert len(prepared[False].examples) == 9
    assert len(prepared[True].examples) == 3
    assert all("reference" in item for item in prepared[False].examples)
    assert not stage_of("grpo").prepare(Rollouts([1.0] * 9), PROMPTS).examples


class Prompts:
    def encode_prompts(self, examples):
        return [[{"input_ids": [1, 2], "labels": [-100, -100]}] for _ in examples]


def test_the_row_is_kept_as_bytes_for_the_reward():
    row = {"question": "1+1?", "answer": "zwei, nämlich 2"}
    example = Example((Message("user", "1+1?"),), columns=row, origin="sums:3")
    ((item,),) = stage_of("grpo").encode([example], Prompts())
    assert isinstance(item["row"], bytes)
    assert read_row(item) == DatasetRow(row, "sums:3")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reward": "no function"},
        {"reward": "r.py:f", "group_size": 1},
        {"reward": "r.py:f", "clip": 1},
        {"reward": "r.py:f", "surrogate": "sapo", "clip_high": 0.3},
        {"reward": "r.py:f", "dual_clip": 2.0},
        {"reward": "r.py:f", "kl_estimator": "k1"},
        {"reward": "r.py:f", "reference": "other"},
        {"reward": "r.py:f", "beta": -0.1},
        {"reward": "r.py:f", "max_sampling_weight": 3.0},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(RecipeError, match=list(settings)[-1] if settings else "reward"):
        read(GRPO, settings)
