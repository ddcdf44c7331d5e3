"""Group relative policy optimization: raise sampled responses that are better than their group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from ..batch import Batch, Features, Loss, Outputs, OutputSpec
from ..data.example import Example
from ..data.section import DataSection
from ..data.text.collation import collate, with_owners, with_token_columns
from ..parallel.section import ParallelSection
from ..schema import Problem, must
from ..schema.locations import FunctionPath
from ..training.conversations import UserEnvironment, converse, sampling_figures, window_figures
from ..training.policy_gradient import (
    ADVANTAGES,
    KL,
    SURROGATES,
    Positions,
    Surrogate,
    is_flat,
    means_of_groups,
    of_response,
    truncated_weights,
)
from ..training.rewards import (
    LEAST_SECONDS,
    RewardProcess,
    by_name,
    last_responses,
    means,
    models_of,
    stepped,
    total,
)
from ..training.rollout import DatasetRow, Event, Rollout, read_row
from ..training.stage import POLICY, AuxiliaryModel, Prepared, StageContext
from ._rules import REFERENCE, OnPolicy, must_not_shard

if TYPE_CHECKING:
    import torch


TOKEN_COLUMNS = ("old", REFERENCE, "advantages", "kept", "sampled")


@dataclass(frozen=True, kw_only=True)
class GRPO(OnPolicy):
    """Train on the policy's own responses by the reward of each, compared with the other responses
    to the same prompt (arXiv:2402.03300).

    ``train.global_batch_size`` counts prompts: a global batch of 16 prompts is a window of 16 x
    ``group_size`` responses, trained on in ``passes`` x ``mini_batches`` optimizer steps. A window
    in which every advantage is 0 is skipped. Dr. GRPO, DAPO, CISPO, GSPO, SAPO, RLOO and
    REINFORCE++ are other settings of ``surrogate``, ``advantage`` and ``average_over``.
    """

    group_size: int = 8
    """Responses to each prompt."""
    surrogate: Literal["clip", "dual_clip", "cispo", "gspo", "sapo", "rloo"] = "clip"
    """What is maximized. ``clip`` is PPO's (arXiv:1707.06347), ``dual_clip`` bounds it below
    (arXiv:1912.09729), ``cispo`` clips weights and no gradients (arXiv:2506.13585), ``gspo`` has
    one ratio per response (arXiv:2507.18071), ``sapo`` a soft bound (arXiv:2511.20347). ``rloo``
    is all of RLOO (arXiv:2402.14740): a response is one action, with the ratio of the probabilities
    of all of it; ``advantage`` is ``rloo``, the mean is over responses, and ``beta`` lowers the
    reward by the KL divergence of the response.
    """
    clip: float | None = None
    """By how much a probability ratio may fall before its gradient is clipped. Unset: 0.2, of
    ``gspo`` 0.0003.
    """
    clip_high: float | None = None
    """By how much it may rise; larger than ``clip``, it is DAPO's Clip-Higher (arXiv:2503.14476:
    0.28). Unset: as ``clip``, of ``gspo`` 0.0004, of ``cispo`` 4.
    """
    dual_clip: float = 3.0
    """``dual_clip`` only: the largest ratio by which a negative advantage is multiplied."""
    sapo_temperature: float = 1.0
    """``sapo`` only: how fast gradients fade where the advantage is positive."""
    sapo_temperature_negative: float = 1.05
    """``sapo`` only: the same where it is negative."""
    advantage: Literal[
        "group", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "group"
    """How a reward becomes an advantage. ``group``: less the mean of its group, in standard
    deviations; ``dr_grpo``: not divided by these (arXiv:2503.20783); ``rloo``: less the mean of
    the others (the baseline of arXiv:2402.14740; ``surrogate: rloo`` is all of it);
    ``reinforce_plus_plus``: whitened over all tokens of the window,
    ``reinforce_plus_plus_baseline``: after its group's mean (arXiv:2501.03262).
    """
    average_over: Literal["responses", "tokens", "max_new_tokens"] = "responses"
    """``responses``: the mean over the tokens of each response, then over all responses (GRPO);
    ``tokens``: over all tokens of an optimizer step (DAPO); ``max_new_tokens``: the sum over the
    tokens of each response, divided by this constant (Dr. GRPO).
    """
    drop_flat_groups: bool = False
    """Do not train on the responses of a group whose rewards are all equal: without it, they count
    in the mean, and ``beta`` pulls them to the reference.
    """
    mask_truncated_completions: bool = False
    """Do not train on a response that was cut, by ``max_new_tokens`` or where the context ends
    (DAPO's overlong filtering). As in TRL, its reward counts in its group, and it keeps its place
    in the mean unless ``average_over`` is ``tokens``.
    """
    beta: float = 0.0
    """Weight of the KL divergence from a reference. 0: there is none."""
    kl_estimator: Literal["k1", "k3"] = "k3"
    """How the divergence is estimated at each token: ``k1`` by the log-ratio, ``k3`` with less
    variance; both times the probability ratio, so that the gradient is right (arXiv:2512.02556).
    """
    environment: FunctionPath | None = None
    """A Python class that answers responses, such as ``tools.py:Calculator``: ``Class(row)`` begins
    a conversation, ``step(response)`` returns the next message, or None at its end.
    """
    max_turns: int = 8
    """Responses in a conversation with an environment at most."""
    max_sampling_weight: float = 2.0
    """Rounding in a server differs from that in training, so each token of its responses weighs
    its probability as trained by that as sampled, at most this (truncated importance sampling). 0:
    all weigh the same.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be at least 1", "max_turns")
        must(self, "be positive", "sapo_temperature", "sapo_temperature_negative", "clip_high")
        must(self, "be between 0 and 1", "clip")
        must(self, "not be negative", "beta", "max_sampling_weight")
        if self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be more than 1, got {self.dual_clip}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {self.group_size}: a response is compared "
                "with the others of its group"
            )
        self._check_effects()

    def try_out(self, examples: Iterator[Example], process: RewardProcess) -> None:
        """An environment answers the responses before they are rewarded."""
        first = [*islice(examples, 2)] if self.environment is not None else []
        if self.environment is not None and first:
            texts = last_responses(first).completions
            rows = [DatasetRow(example.columns, example.origin) for example in first]
            events = [Event(n, rows[n], text, True) for n, text in enumerate(texts)]
            stepped(process, self.environment, events, max(LEAST_SECONDS, self.reward_timeout))
        super().try_out(chain(first, examples), process)

    def _check_effects(self) -> None:
        """Raise ``ValueError`` for a setting that does nothing beside the others."""
        optional_settings = {name for each in SURROGATES.values() for name in each.settings}
        for name in sorted(optional_settings - {*self._surrogate.settings}):
            if getattr(self, name) != getattr(GRPO, name):
                raise ValueError(f"{name} has no effect with surrogate: {self.surrogate}")
        for name, fixed_value in self._surrogate.own.items():
            if getattr(self, name) not in (fixed_value, getattr(GRPO, name)):
                raise ValueError(f"{name} is always {fixed_value} with surrogate: {self.surrogate}")
        usual_weight = self.max_sampling_weight == GRPO.max_sampling_weight
        if self.sampler.server is None and not usual_weight:
            raise ValueError("max_sampling_weight has no effect without a server as sampler")
        if self.environment is None and self.max_turns != GRPO.max_turns:
            raise ValueError("max_turns has no effect without an environment")
        for name in ("kl_estimator", "reference"):
            if not self.beta and getattr(self, name) != getattr(GRPO, name):
                raise ValueError(f"{name} has no effect unless beta is positive")

    @property
    def _surrogate(self) -> Surrogate:
        return SURROGATES[self.surrogate]

    @property
    def _is_weighted(self) -> bool:
        """Whether tokens weigh as much as they are more probable in training than as sampled."""
        return self.sampler.server is not None and self.max_sampling_weight > 0

    @property
    def _is_kl_in_reward(self) -> bool:
        return self.beta > 0 and self._is_one_action

    @property
    def _is_one_action(self) -> bool:
        """Whether a response is one action, as in RLOO."""
        return self.surrogate == "rloo"

    @property
    def bounds(self) -> tuple[float, float]:
        """By how much a ratio may fall, and rise."""
        usual = self._surrogate
        low = usual.clip if self.clip is None else self.clip
        high = self.clip_high
        if high is None:
            high = low if self.clip is not None or usual.clip_high is None else usual.clip_high
        return low, high

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """The reference, if there is one, and reward models."""
        models = models_of(self.reward)
        if self.beta:
            models[REFERENCE] = AuxiliaryModel(self.spec, self.reference, "window")
        return models

    @property
    def spec(self) -> OutputSpec:
        """Log-probabilities under the distribution that is sampled from."""
        return OutputSpec(("logps",), temperature=self.temperature)

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack prompts with their responses into one row, or pad them to a rectangle."""
        batch = with_owners(collate(features, packing=packing), features)
        return with_token_columns(batch, features, TOKEN_COLUMNS)

    def prepare(self, context: StageContext, examples: Sequence[Features]) -> Prepared:
        """Sample a group of responses to each prompt, reward them, and compare them."""
        rollouts = self._rollouts(context, examples)
        named_rewards = by_name(self.reward)
        rewarded = context.reward(
            named_rewards, rollouts, self.reward_timeout, self.on_reward_error
        )
        by_reward = rewarded.by_reward
        rewards = total(by_reward, [reward.weight for reward in self.reward])
        groups = self._groups(rewards)
        # Before anything is learned from them: were they not the samples of this policy, the ratios
        # of the surrogate would be wrong without a word.
        gaps = sampling_figures(context, POLICY, rollouts, self.sampler)
        flat = sum(map(is_flat, groups)) / len(groups)
        known_rewards = [reward for reward in rewards if reward is not None]
        figures = {
            **rewarded.metrics,
            **window_figures(known_rewards, rollouts, flat_groups=flat),
            **means([*named_rewards], by_reward),
            **gaps,
        }
        is_cut = [self.mask_truncated_completions and rollout.is_cut for rollout in rollouts]
        if self._is_kl_in_reward:
            kls = self._kls(context, rollouts, is_cut)
            # fsum() rounds once, so the figure does not depend on the order of responses.
            figures["kl"] = math.fsum(kls) / len(kls)
            pairs = zip(rewards, kls, strict=True)
            groups = self._groups([None if r is None else r - self.beta * kl for r, kl in pairs])
        advantage = self._surrogate.own.get("advantage", self.advantage)
        lengths = [rollout.num_sampled for rollout in rollouts]
        advantages = ADVANTAGES[advantage](groups, lengths)
        # It would train towards the reference alone, and a reward that distinguishes nothing would
        # go unnoticed (docs/decisions/0052).
        rows = means_of_groups(self._groups(rewards))
        if not any(a for a, is_masked in zip(advantages, is_cut, strict=True) if not is_masked):
            return Prepared((), figures, rows=rows)
        dropped = [self.drop_flat_groups and is_flat(g) for g in groups for _ in g]
        items = [
            self._item(rollout, advantage, is_masked=is_masked)
            for rollout, advantage, is_masked, is_dropped in zip(
                rollouts, advantages, is_cut, dropped, strict=True
            )
            if rollout.num_sampled
            # In a mean over responses a masked one still counts; over tokens it has none.
            and not (is_dropped or (is_masked and self.average_over == "tokens"))
        ]
        return Prepared(self._with_columns(context, items), figures, rows=rows)

    def _groups(self, rewards: Sequence[float | None]) -> list[Sequence[float | None]]:
        starts = range(0, len(rewards), self.group_size)
        return [rewards[start : start + self.group_size] for start in starts]

    def _kls(
        self, context: StageContext, rollouts: Sequence[Rollout], is_masked: Sequence[bool]
    ) -> list[float]:
        """The log-ratio of the policy that sampled and the reference, summed over each response; 0
        of those that are not trained on, as in TRL."""
        is_used = [
            rollout.num_sampled > 0 and not is_out
            for rollout, is_out in zip(rollouts, is_masked, strict=True)
        ]
        chosen = [i for i, is_chosen in enumerate(is_used) if is_chosen]
        items = [rollouts[i].features(0.0) for i in chosen]
        kls = [0.0] * len(rollouts)
        both = [context.compute(role, items) if items else [] for role in (POLICY, REFERENCE)]
        for i, policy, reference in zip(chosen, *both, strict=True):
            assert policy.logps is not None
            assert reference.logps is not None
            # In float64: the difference is small beside both.
            kls[i] = float((policy.logps.double() - reference.logps.double()).sum())
        return kls

    def _item(self, rollout: Rollout, advantage: float, *, is_masked: bool) -> Features:
        """A response to train on, or, masked, one that only counts in the mean."""
        item = dict(rollout.features(0.0 if is_masked else advantage))
        if self.mask_truncated_completions:
            item["kept"] = [int(not is_masked)] * rollout.num_sampled
        if self._is_weighted:
            item["sampled"] = rollout.sampled_logps  # type: ignore[assignment]
        return item

    def _rollouts(self, context: StageContext, examples: Sequence[Features]) -> list[Rollout]:
        """A group of responses to each prompt, one after the other."""
        prompts = [([int(x) for x in item["input_ids"]], read_row(item)) for item in examples]
        repeated = [
            (ids, row, number)
            for number, (ids, row) in enumerate(prompts)
            for _ in range(self.group_size)
        ]
        if self.environment is None:
            return converse(context, repeated, self.sampling)
        environment = UserEnvironment(self.environment, self.reward_timeout)
        return converse(context, repeated, self.sampling, environment, self.max_turns)

    def _with_columns(self, context: StageContext, items: list[Features]) -> list[Features]:
        """With the log-probabilities of the reference, and those before the first of several steps:
        in a single step they are those of the step itself, which weights need before it."""
        roles = {REFERENCE: REFERENCE} if self.beta and not self._is_kl_in_reward else {}
        if self.passes * self.mini_batches > 1 or self._is_weighted:
            roles["old"] = POLICY
        for name, role in roles.items() if items else ():
            pairs = zip(items, context.compute(role, items), strict=True)
            items = [{**item, name: outputs.logps} for item, outputs in pairs]  # type: ignore[dict-item]
        return items

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The negative surrogate and the KL penalty, averaged as ``average_over`` says."""
        assert outputs.logps is not None
        logps_N, extras = outputs.logps, batch.extras
        # In a single step the policy is the one that sampled: the ratio is 1, and its
        # gradient that of the log-probability.
        old_N = extras["old"].to(logps_N) if "old" in extras else logps_N.detach()
        gains_N, is_clipped_N = self._surrogate.compute(self._positions(logps_N, old_N, extras))
        measured = {"clip_ratio": is_clipped_N.to(logps_N)}
        if self._is_weighted:  # not by what is there: a rank without examples has every column
            gaps_N = old_N - extras["sampled"].to(logps_N)
            if self._is_one_action:
                gaps_N = of_response(gaps_N, extras["owner"], len(extras["lengths"]))
            weights_N = truncated_weights(gaps_N, self.max_sampling_weight)
            gains_N = gains_N * weights_N
            measured["sampling_weight"] = weights_N
            measured["sampling_weight_capped"] = (weights_N >= self.max_sampling_weight).to(logps_N)
        if self.beta and not self._is_kl_in_reward:
            kl_N = KL[self.kl_estimator](logps_N, extras[REFERENCE].to(logps_N), old_N)
            gains_N = gains_N - self.beta * kl_N
            measured["kl"] = kl_N.detach()
        lengths_N = extras["lengths"][extras["owner"]].to(logps_N)
        is_by_token = self.average_over == "tokens"
        means_N = lengths_N.new_ones(()) if is_by_token else 1 / lengths_N
        shares_N = means_N
        if self.average_over == "max_new_tokens":
            shares_N = lengths_N.new_full((), 1 / self.max_new_tokens)
        if "kept" in extras:
            shares_N = shares_N * extras["kept"].to(logps_N)
        weight = (lengths_N > 0).sum() if is_by_token else (extras["lengths"] > 0).sum()
        metrics = {name: (values_N * means_N).sum() for name, values_N in measured.items()}
        return Loss(-(gains_N * shares_N).sum(), weight, metrics)

    def _positions(
        self, logps_N: torch.Tensor, old_N: torch.Tensor, extras: Mapping[str, torch.Tensor]
    ) -> Positions:
        low, high = self.bounds
        temperatures = self.sapo_temperature, self.sapo_temperature_negative
        advantages_N = extras["advantages"].to(logps_N)
        lengths_A = extras["lengths"].to(logps_N)
        return Positions(
            *(logps_N, old_N, advantages_N, extras["owner"], lengths_A),
            *(low, high, self.dual_clip, temperatures),
        )

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Responses are the policy's own, which a pipeline cannot sample."""
        yield from super().problems(data, parallel)
        message = "stage grpo cannot sample from a pipeline; set it to 1"
        yield from must_not_shard(parallel, ("pp",), message)
