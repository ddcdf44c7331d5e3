"""Values and gradients beside those of verl's and OpenRLHF's own functions on the same numbers.

``record_verl_and_openrlhf.py`` has recorded theirs from their code, in padded rows. Where a formula
differs by design, the test says so and applies the difference to ours or undoes theirs.

Never applied, since no number here is so large: verl and OpenRLHF clamp log-ratios to 20, verl's
gspo to 10, and estimates of the KL divergence to 10. We clamp none.
"""

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stage_data import stage_of
from surefoot.batch import Outputs
from surefoot.data.section import DataSection
from surefoot.data.text.collation import join
from surefoot.generate.generation import Sample
from surefoot.model.chunked_cross_entropy import forward_kl
from surefoot.stages._ppo import REFERENCE
from surefoot.training import losses as preferences
from surefoot.training.losses import LOSSES, Pairs
from surefoot.training.policy_gradient import (
    ADVANTAGES,
    KL,
    adapted_coefficient,
    clipped_value_losses,
    group_advantages,
    kl_estimates,
)
from surefoot.training.rewards import Rewarded

RECORD = json.loads(Path(__file__).with_name("verl_and_openrlhf.json").read_text("utf-8"))
VERL, OPENRLHF, BEFORE = (RECORD[name] for name in ("verl", "openrlhf", "openrlhf_before"))
GIVEN = RECORD["inputs"]
LENGTHS = GIVEN["lengths"]
COUNT = sum(LENGTHS)
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
PARTS = [slice(start, start + n) for start, n in zip(STARTS, LENGTHS, strict=True)]
GROUPS = [GIVEN["rewards"][i : i + 3] for i in range(0, len(LENGTHS), GIVEN["group_size"])]
WHOLE = (0, len(LENGTHS))  # one micro-batch
TINY = 1e-8  # what both add to a count that they divide by
KINDS = {
    "clip": {},
    "clip_higher": {"clip": 0.2, "clip_high": 0.28},
    "dual_clip": {"surrogate": "dual_clip"},
    "gspo": {"surrogate": "gspo", "clip": 0.1, "clip_high": 0.15},
    "cispo": {"surrogate": "cispo", "clip_high": 1.0},
    "sapo": {"surrogate": "sapo"},
}
OF_RESPONSES = [GIVEN["advantages"][i] for i, n in enumerate(LENGTHS) for _ in range(n)]


def given(name):
    return torch.tensor(GIVEN[name], dtype=torch.float64)


def close(expected):
    return pytest.approx(expected, rel=1e-10, abs=1e-12)


def slopes_of(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0].flatten().tolist()


def policy_items(advantages=OF_RESPONSES):
    """The responses, each after a prompt of two tokens."""
    return [
        {
            "input_ids": [1, 2, *range(10, 10 + n)],
            "labels": [-100, -100, *range(10, 10 + n)],
            "advantages": advantages[part],
            **{name: GIVEN[name][part] for name in ("old", "reference", "old_values", "returns")},
        }
        for n, part in zip(LENGTHS, PARTS, strict=True)
    ]


def grpo(kind, average, **settings):
    usual = {"beta": 0.0, "max_new_tokens": GIVEN["max_new_tokens"], "average_over": average}
    return stage_of("grpo", **{**usual, **KINDS[kind], **settings})


def losses_of(stage, logps, bounds=WHOLE, *, packing=True):
    """The loss and the weight of each micro-batch of responses between the bounds."""
    every, found = policy_items(), []
    for first, last in pairwise(bounds):
        batch = stage.collate(every[first:last], packing=packing)
        part = logps[PARTS[first].start : PARTS[last - 1].stop]
        found.append(stage.loss("policy", Outputs(logps=part), batch))
    return found


def with_their_means(stage, logps, *, packing):
    """The mean over responses as both compute it: each has ``TINY`` more tokens."""
    each = losses_of(stage, logps, range(len(LENGTHS) + 1), packing=packing)
    return sum(one.total * n / (n + TINY) for one, n in zip(each, LENGTHS, strict=True)) / len(each)


POLICY = [
    (name, kind, average)
    for name, record in (("verl", VERL), ("openrlhf", OPENRLHF))
    for kind, average in map(str.split, record["policy"])
    if kind in KINDS
]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("name", "kind", "average"), POLICY)
def test_policy_losses_and_gradients_are_theirs(name, kind, average, packing):
    """Also those of verl's gspo, whose gradient takes another way (GSPO-token): both are equal if
    all tokens of a response have one advantage. In verl, ``cispo`` is given no bound below, as in
    its paper."""
    theirs, stage = RECORD[name]["policy"][f"{kind} {average}"], grpo(kind, average)
    logps = given("logps").requires_grad_()
    if average == "responses":
        ours = with_their_means(stage, logps, packing=packing)
    else:
        (whole,) = losses_of(stage, logps, packing=packing)
        ours = whole.total / whole.weight
    assert ours.item() == close(theirs["value"])
    assert slopes_of(ours, logps) == close(theirs["gradient"])


def test_verls_lower_bound_of_cispo_is_that_of_a_weight():
    """MiniMax-M1 sets none (arXiv:2506.13585), and we have none. With one of 0.2,
    the gradient of a token whose ratio is below 0.8 is 0.8 of what it is on policy."""
    logps = given("logps").requires_grad_()
    (whole,) = losses_of(grpo("cispo", "tokens"), logps)
    ratios = (given("logps") - given("old")).exp().tolist()
    assert min(ratios) < 0.8
    ours = zip(slopes_of(whole.total / whole.weight, logps), ratios, strict=True)
    theirs = VERL["policy"]["cispo_above tokens"]["gradient"]
    assert [slope * max(1, 0.8 / ratio) for slope, ratio in ours] == close(theirs)


def test_micro_batches_that_are_divided_by_global_counts_are_verls():
    logps = given("logps").requires_grad_()
    for bounds in ((0, 4, 9), (0, 1, 6, 9)):
        parts = losses_of(grpo("clip", "tokens"), logps, bounds)
        ours = sum(one.total for one in parts) / sum(one.weight for one in parts)
        assert ours.item() == close(VERL["micro_batches"]["value"])
        assert slopes_of(ours, logps) == close(VERL["micro_batches"]["gradient"])


@pytest.mark.parametrize("packing", [True, False])
def test_ppo_is_openrlhfs_loss_of_the_policy_and_of_the_values(packing):
    """Each token has an advantage of its own."""
    stage = stage_of("ppo", clip=0.2, value_clip=0.2, value_coefficient=0.3)
    batch = stage.collate(policy_items(GIVEN["token_advantages"]), packing=packing)
    logps, values = given("logps").requires_grad_(), given("values").requires_grad_()
    loss = stage.loss("policy", Outputs(logps=logps, values=values), batch)
    assert loss.weight == batch.num_trained
    ours, policy = loss.total / loss.weight, OPENRLHF["token_policy"]
    errors = OPENRLHF["values"]["0.2"]
    assert ours.item() == close(policy["value"] + 0.3 * errors["value"])
    found, of_values = torch.autograd.grad(ours, [logps, values])
    assert found.tolist() == close(policy["gradient"])
    assert of_values.tolist() == close([0.3 * slope for slope in errors["gradient"]])


@pytest.mark.parametrize(
    ("clip", "theirs"),
    [(0.2, VERL["values"]), (0.2, OPENRLHF["values"]["0.2"]), (None, OPENRLHF["values"]["None"])],
    ids=["verl", "openrlhf", "openrlhf without clip"],
)
def test_value_losses_are_theirs(clip, theirs):
    values = given("values").requires_grad_()
    ours = clipped_value_losses(values, given("old_values"), given("returns"), clip).mean()
    assert ours.item() == close(theirs["value"])
    assert slopes_of(ours, values) == close(theirs["gradient"])


def test_estimates_of_the_kl_divergence_are_theirs():
    own, other = (np.asarray(GIVEN[name]) for name in ("logps", "reference"))
    for kind, verls in (("k1", "kl"), ("k3", "low_var_kl")):
        ours = kl_estimates(own, other, kind)
        assert ours == close(VERL["kl"][verls]["each"])
        assert ours == close(OPENRLHF["kl"][kind])


@pytest.mark.parametrize(("kind", "verls"), [("k1", "kl"), ("k3", "low_var_kl")])
def test_a_kl_penalty_in_the_loss_is_verls_times_the_ratio(kind, verls):
    """Ours is multiplied by the ratio to the policy that sampled (arXiv:2512.02556). Without it,
    the expected gradient of ``k1`` is 0, and that of ``k3`` is of the other divergence."""
    logps, theirs = given("logps").requires_grad_(), VERL["kl"][verls]
    ours = KL[kind](logps, given("reference"), given("old"))
    ratios = (given("logps") - given("old")).exp().tolist()
    each = list(zip(ratios, theirs["each"], theirs["gradient"], strict=True))
    assert ours.tolist() == close([ratio * value for ratio, value, _ in each])
    expected = [ratio * (slope + value) for ratio, value, slope in each]
    assert slopes_of(ours.sum(), logps) == close(expected)


def test_on_policy_the_gradient_of_a_kl_penalty_is_that_of_verls_unbiased_one():
    """verl's ``k3+`` has the value of ``k3`` and the gradient of ``k2``, which is right. That of
    ``k1`` has 1 more, times the gradient of a log-probability, whose expectation is 0."""
    for kind, more in (("k1", 1.0), ("k3", 0.0)):
        logps, theirs = given("logps").requires_grad_(), VERL["kl"][f"{kind}+"]
        ours = KL[kind](logps, given("reference"), logps.detach())
        assert ours.tolist() == close(theirs["each"])
        assert slopes_of(ours.sum(), logps) == close([slope + more for slope in theirs["gradient"]])


def moments(values):
    """Mean and sum of squared differences from it."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values)


def unwhitened_by_verl(whitened, values):
    """What verl has whitened to these: with Bessel's correction, and ``TINY`` more in each count
    and in the variance."""
    count = len(values)
    mean = math.fsum(values) / (count + TINY)
    squares = math.fsum((value - mean) ** 2 for value in values)
    variance = squares / (count + TINY) * count / (count - 1)
    return [x * math.sqrt(variance + TINY) + mean for x in whitened]


@dataclass
class Window:
    """A context of the responses that were recorded."""

    state: dict = field(default_factory=dict)

    def generate(self, prompts, settings, *, turn=0):
        return [
            Sample(tuple(range(10, 10 + n)), tuple(GIVEN["old"][part]), "stop")
            for n, part in zip(LENGTHS, PARTS, strict=True)
        ]

    def reward(self, rewards, rollouts, seconds, on_error):
        return Rewarded([GIVEN["rewards"]])

    def compute(self, role, examples):
        names = ("reference", "reference") if role == REFERENCE else ("old", "old_values")
        logps, values = map(given, names)
        return [Outputs(logps=logps[part], values=values[part]) for part in PARTS]


def window(**settings):
    """Advantages and returns of the tokens of a window of PPO."""
    usual = {"normalize_scores": False, "whiten_rewards": False, "kl_target": None}
    usual |= {"kl_horizon": 10_000, "kl_coefficient": 0.1, "max_new_tokens": max(LENGTHS)}
    stage = stage_of("ppo", **usual, **settings)
    prompt = {"input_ids": [1, 2], "labels": [-100, -100], "row": b"{}"}
    items = stage.prepare(Window(), [prompt] * len(LENGTHS)).examples
    names = ("advantages", "returns")
    return [np.concatenate([item[name] for item in items]) for name in names]


@pytest.mark.parametrize("theirs", VERL["gae"], ids=lambda one: f"{one['gamma']:g}")
def test_a_window_of_ppo_is_verls(theirs):
    """Scores at last tokens, a penalty at each, advantages and returns. Whitened by the same
    formula but for ``TINY`` in counts."""
    settings = {name: theirs[name] for name in ("gamma", "gae_lambda")}
    plain, returns = window(**settings, whiten_advantages=False)
    assert returns == close(theirs["returns"])
    assert unwhitened_by_verl(theirs["advantages"], plain) == close(plain)
    assert window(**settings)[0] == pytest.approx(theirs["advantages"], rel=1e-7)


def test_a_window_of_ppo_is_openrlhfs():
    """It whitens with the variance of a population, of at least 1e-8; we with Bessel's correction
    as TRL and verl, and 1e-8 more."""
    settings, theirs = {"gamma": 1.0, "gae_lambda": 0.95}, OPENRLHF["windows"]["gae"]
    plain, returns = window(**settings, whiten_advantages=False)
    assert returns == close(theirs["returns"])
    _, squares = moments(plain)
    scale = math.sqrt(squares / COUNT) / math.sqrt(squares / (COUNT - 1) + 1e-8)
    assert window(**settings)[0] == close([scale * x for x in theirs["advantages"]])


def ours_of(name):
    return ADVANTAGES[name](GROUPS, LENGTHS)


def test_advantages_of_groups_are_theirs():
    """Standard deviations have Bessel's correction in all. We and TRL add 1e-4 to that of a group;
    verl adds 1e-6 unless told otherwise, OpenRLHF 1e-9."""
    verls, others = VERL["advantages"], OPENRLHF["windows"]
    for name in ("group", "dr_grpo", "rloo"):
        assert ours_of(name) == close(verls[name]), name
    for name in ("dr_grpo", "rloo"):
        assert ours_of(name) == close(others[name]["advantages"]), name
    told = ((1e-6, verls["group, their epsilon"]), (1e-9, others["group_norm"]["advantages"]))
    for epsilon, theirs in told:
        assert [x for one in GROUPS for x in group_advantages(one, epsilon)] == close(theirs)


def test_advantages_over_all_tokens_are_theirs():
    """The variance is that of a population, as OpenRLHF's, by the authors of the paper; verl's has
    Bessel's correction. A response has one advantage: no penalty is in the rewards of its
    tokens, and nothing is discounted."""
    kinds = {
        "reinforce_plus_plus": ("reinforce", GIVEN["rewards"]),
        "reinforce_plus_plus_baseline": ("reinforce_baseline", ours_of("dr_grpo")),
    }
    for name, (openrlhfs, before) in kinds.items():
        assert ours_of(name) == close(OPENRLHF["windows"][openrlhfs]["advantages"]), name
        of_tokens = [before[i] for i, n in enumerate(LENGTHS) for _ in range(n)]
        verls = VERL["advantages"][name]
        known = [verls[i] for i, n in enumerate(LENGTHS) for _ in range(n)]
        assert unwhitened_by_verl(known, of_tokens) == close(of_tokens), name
        mean, squares = moments(of_tokens)
        ours = [x * math.sqrt(squares / COUNT) + mean for x in ours_of(name)]
        assert ours == close(before), name


def test_a_response_without_another_of_its_group_has_no_advantage():
    """So it is in verl's ``rloo_vectorized``; its ``rloo`` leaves such a response its reward."""
    first, *rest = GIVEN["rewards"][:3]
    assert VERL["advantages"]["rloo, alone"][0] == first
    ours = ADVANTAGES["rloo"]([[first, None], rest], [1] * 4)
    assert [ours[0], *ours[2:]] == close(VERL["advantages"]["rloo_vectorized, alone"])
    assert ADVANTAGES["group"]([[first, None], rest], [1] * 4)[0] == 0


def test_the_coefficient_adapts_as_theirs():
    found = [0.2]
    for kl in (3.0, 6.3, 60.0):
        found.append(adapted_coefficient(found[-1], kl, target=6.0, count=64, horizon=1000))
    assert found[1:] == close(VERL["coefficients"])
    assert found[1:] == close(OPENRLHF["coefficients"])


def interleaved(values):
    """[2 P] chosen and rejected of each pair, of all chosen and then all rejected."""
    return torch.stack(values.chunk(2), 1).flatten()


def both(prefix=""):
    return torch.cat([given(f"{prefix}chosen"), given(f"{prefix}rejected")])


@pytest.mark.parametrize("name", OPENRLHF["rewards"])
def test_losses_of_reward_models_are_openrlhfs(name):
    """A mean over pairs; ``log_exp`` is the same function as the plain one."""
    stage, theirs = stage_of("rm", use_margins=name == "margin"), OPENRLHF["rewards"][name]
    items = []
    for margin in GIVEN["margins"]:
        chosen, rejected = ({"input_ids": [1, 2, x], "labels": [-100, -100, x]} for x in (3, 4))
        bits = np.float32(margin).view(np.int32)  # as the cache has it
        items.append({**join(chosen, rejected), "margin": [bits]})
    rewards = both().requires_grad_()
    batch = stage.collate(items, packing=True)
    loss = stage.loss("policy", Outputs(values=interleaved(rewards)), batch)
    ours = loss.total / loss.weight
    assert ours.item() == close(theirs["value"])
    assert slopes_of(ours, rewards) == close(theirs["gradient"])


@pytest.mark.parametrize("name", OPENRLHF["pairs"])
def test_losses_of_pairs_are_openrlhfs(name):
    """Its ``ipo`` is of sums over tokens, as in the paper; our stage divides them by the lengths of
    the responses first, as TRL does, and here both get the same numbers."""
    theirs, smoothing = OPENRLHF["pairs"][name], 0.1 if name == "smoothed" else 0.0
    logps = both().requires_grad_()
    chosen, rejected = (logps - both("reference_")).chunk(2)
    pairs = Pairs(chosen, rejected, -chosen, 0.3, 0.5, smoothing)
    loss = LOSSES["ipo" if name == "ipo" else "sigmoid"]
    assert loss.per_token == (name == "ipo")
    ours = loss.compute(pairs).mean()
    assert ours.item() == close(theirs["value"])
    assert slopes_of(ours, logps) == close(theirs["gradient"])


@dataclass
class Models:
    """A context of log-probabilities that were recorded; mismatched examples are not marked."""

    policy: list
    reference: list
    codec = SimpleNamespace(section=DataSection(datasets=("any",)))

    def reduce(self, role, examples, function):
        if "desirable" in examples[0]:
            return both("reference_").numpy()
        return np.asarray(self.policy if role == "policy" else self.reference)


@pytest.mark.parametrize("is_likelier", [True, False])
def test_kto_is_openrlhfs(is_likelier):
    """Its baseline is the mean over mismatched pairs, at least 0, without a gradient; ours is that
    of the whole global batch."""
    stage = stage_of("kto", beta=0.3, undesirable_weight=1.5, precompute_reference=False)
    theirs = BEFORE["kto" if is_likelier else "kto, less likely"]
    known, other = GIVEN["mismatched"], GIVEN["reference_mismatched"]
    item = {"input_ids": [1, 2], "labels": [-100, 2]}
    items = [{**item, "desirable": [int(i < 6)]} for i in range(12)]
    context = Models(known, other) if is_likelier else Models(other, known)
    prepared = stage.prepare(context, items)
    assert (prepared.figures["kl"] > 0) == is_likelier
    batch, logps = stage.collate(prepared.examples, packing=True), both().requires_grad_()
    loss = stage.loss("policy", Outputs(logps=logps), batch)
    ours = loss.total / loss.weight
    assert ours.item() == close(theirs["value"])
    assert slopes_of(ours, logps) == close(theirs["gradient"])


def test_kto_without_mismatched_pairs_is_openrlhfs_vanilla_one_if_its_baseline_has_a_gradient():
    """It takes for each kind the mean log-ratio of the other one, and lets the gradient pass
    through it. The paper does not (arXiv:2402.01306); nor do we."""
    logps = both().requires_grad_()
    ratios = logps - both("reference_")
    is_good = torch.arange(12) < 6
    means = [part.mean().clamp(min=0) for part in ratios.chunk(2)]
    z = torch.where(is_good, means[1], means[0])
    assert z.any()
    for baseline, is_theirs in ((z, True), (z.detach(), False)):
        ours = preferences.kto(ratios, is_good, baseline, 0.3).mean()
        assert ours.item() == close(BEFORE["vanilla_kto"]["value"])
        assert (slopes_of(ours, logps) == close(BEFORE["vanilla_kto"]["gradient"])) == is_theirs


def test_distillation_is_openrlhfs_less_the_entropy_of_the_teacher():
    """It is the cross entropy of the teacher's distribution: the same gradient."""
    own, other = (given(name).log_softmax(-1) for name in ("logits", "teacher_logits"))
    is_there = (torch.tensor(GIVEN["labels"]) != -100).double()
    found, slopes = forward_kl(own, other, 0.5)
    entropies = -(other.exp() * other).sum(-1)
    total = ((found + entropies) * is_there).sum() / is_there.sum()
    assert total.item() == close(BEFORE["kd"]["value"])
    slopes = slopes * is_there[:, None] / is_there.sum()
    assert slopes.flatten().tolist() == close(BEFORE["kd"]["gradient"])
