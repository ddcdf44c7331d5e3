"""Proximal policy optimization: raise the sampled tokens that did better than a value head said."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..batch import IGNORE_INDEX, Batch, Features, Loss, Outputs, OutputSpec
from ..data.section import DataSection
from ..data.text.collation import collate, with_token_columns
from ..errors import RunError, counted
from ..parallel.section import ParallelSection
from ..schema import Problem, must
from ..training.conversations import converse, gap_figures, window_figures
from ..training.policy_gradient import (
    KLEstimator,
    RunningMoments,
    adapted_coefficient,
    clipped,
    clipped_value_losses,
    explained_variance,
    generalized_advantages,
    kl_estimates,
    means_of_groups,
    whitened,
)
from ..training.rewards import by_name, means, models_of, total
from ..training.rollout import Rollout, read_row
from ..training.stage import POLICY, AuxiliaryModel, Prepared, StageContext
from ._rules import REFERENCE, OnPolicy, must_not_shard

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


MAX_FLAT = 10  # first windows of equal scores, after which the run is stopped


@dataclass(frozen=True)
class _Response:
    """One scored response of a window."""

    rollout: Rollout
    score: float  # of the rewards, as they were given


@dataclass(frozen=True, kw_only=True)
class PPO(OnPolicy):
    """Train on the policy's own responses (arXiv:1707.06347, for language models arXiv:1909.08593):
    a reward for each response at its end, a penalty for moving away from the reference at each
    token, and a value head on the policy that predicts what is still to come.

    ``train.global_batch_size`` counts prompts: a global batch is a window of as many responses,
    trained on in ``passes`` x ``mini_batches`` optimizer steps. All means are over the tokens of
    such a step. The reference is the policy as it was before the first step, and no second model in
    memory: with a new adapter the base under it, otherwise a copy of the trained weights.
    """

    heads: ClassVar[Mapping[str, int]] = {"values": 1}

    passes: int = 4
    """How often the responses of a window are trained on."""
    clip: float = 0.2
    """By how much the probability ratio of a token may change before its gradient is clipped."""
    value_clip: float | None = 0.2
    """By how much a value may change in a window before its gradient is clipped. ``null``: by any
    amount.
    """
    value_coefficient: float = 0.1
    """Weight of the loss of the values."""
    gamma: float = 1.0
    """Discount of each token."""
    gae_lambda: float = 0.95
    """How far advantages look ahead (arXiv:1506.02438): 1 uses the rewards of the whole response,
    0 the next value alone.
    """
    kl_coefficient: float = 0.05
    """Penalty of each token for each nat that the policy has moved away from the reference. 0 needs
    no reference.
    """
    kl_target: float | None = None
    """Adapt ``kl_coefficient`` so that responses are so many nats away from the reference
    (arXiv:1909.08593), such as 6. Unset: it is fixed.
    """
    kl_horizon: int = 10000
    """Responses over which the coefficient adapts."""
    kl_estimator: KLEstimator = "k1"
    """``k1`` is the log-ratio of a token, ``k3`` has less variance and is never negative."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a window to mean 0 and variance 1."""
    whiten_rewards: bool = False
    """Scale the rewards of the tokens of a window to variance 1."""
    normalize_scores: bool = False
    """Shift and scale scores by the mean and standard deviation of all scores so far."""
    clip_scores: float | None = None
    """Clip scores to plus and minus this, once they are normalized."""
    missing_end_penalty: float = 0.0
    """Subtracted from the score of a response that does not end within ``max_new_tokens``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be at least 1", "kl_horizon")
        must(self, "be positive", "value_clip", "kl_target", "clip_scores")
        must(
            *(self, "not be negative"),
            *("value_coefficient", "kl_coefficient", "missing_end_penalty"),
        )
        must(self, "be between 0 and 1", "clip")
        must(self, "be from 0 to 1", "gamma", "gae_lambda")
        if self.kl_target is not None and not self.kl_coefficient:
            raise ValueError("kl_target needs a kl_coefficient to start from, got 0")
        for name in ("kl_estimator", "reference"):
            if not self.kl_coefficient and getattr(self, name) != getattr(PPO, name):
                raise ValueError(f"{name} has no effect unless kl_coefficient is positive")
        if self.kl_target is None and self.kl_horizon != PPO.kl_horizon:
            raise ValueError("kl_horizon has no effect without a kl_target")

    @property
    def spec(self) -> OutputSpec:
        """Values, and log-probabilities under the distribution that is sampled from."""
        return OutputSpec(("logps", "values"), temperature=self.temperature)

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """The reference, if there is one, and reward models."""
        models = models_of(self.reward)
        if self.kl_coefficient:
            spec = OutputSpec(("logps",), temperature=self.temperature)
            models[REFERENCE] = AuxiliaryModel(spec, self.reference, "window")
        return models

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack prompts with their responses into one row, or pad them to a rectangle."""
        names = ["old", "old_values", "advantages", "returns"]
        return with_token_columns(collate(features, packing=packing), features, names)

    def prepare(self, context: StageContext, examples: Sequence[Features]) -> Prepared:
        """Sample a response to each prompt, score it, and find how much better each of its tokens
        was than its value."""
        prompts = [
            ([int(x) for x in item["input_ids"]], read_row(item), number)
            for number, item in enumerate(examples)
        ]
        rollouts = converse(context, prompts, self.sampling)
        named_rewards = by_name(self.reward)
        rewarded = context.reward(
            named_rewards, rollouts, self.reward_timeout, self.on_reward_error
        )
        by_reward = rewarded.by_reward
        scores = total(by_reward, [reward.weight for reward in self.reward])
        responses = [
            _Response(rollout, score)
            for rollout, score in zip(rollouts, scores, strict=True)
            if score is not None and rollout.num_sampled
        ]
        figures = {
            **rewarded.metrics,
            **window_figures([response.score for response in responses], rollouts),
            **means([*named_rewards], by_reward),
        }
        rows = means_of_groups([[score] for score in scores])
        if not responses:
            return Prepared((), figures, context.state, rows)
        return replace(self._window(context, responses, figures), rows=rows)

    def _window(
        self, context: StageContext, responses: Sequence[_Response], figures: dict[str, float]
    ) -> Prepared:
        """The window of these responses."""
        rollouts = [response.rollout for response in responses]
        state, items = dict(context.state), [rollout.features(0.0) for rollout in rollouts]
        outputs = context.compute(POLICY, items)
        logps, values = [_array(o.logps) for o in outputs], [_array(o.values) for o in outputs]
        flat_logps = [float(logp) for logps_T in logps for logp in logps_T]
        # Before whitening and penalties: what was sampled beside what this pass computes for it.
        figures |= gap_figures(rollouts, flat_logps, self.sampler)
        scores = self._final_scores(responses, state)
        # Equal scores would be whitened to noise of variance 1: rounding, and the penalty
        # (docs/decisions/0055). The window is trained on all the same, as its values have something
        # to learn.
        is_flat = len(scores) > 1 and len(set(scores)) < 2  # one response tells nothing
        _count_flat(state, scores, is_flat=is_flat)
        rewards, kl_figures = self._rewards(context, items, logps, scores, state)
        advantages = self._advantages(rewards, values)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        if self.whiten_advantages and not is_flat:  # the rest would be noise of variance 1
            advantages = whitened(advantages, shift_mean=True)
        columns = {"old": logps, "old_values": values, "advantages": advantages, "returns": returns}
        trained = [
            {**item, **{name: column[i] for name, column in columns.items()}}
            for i, item in enumerate(items)
        ]
        figures |= {**kl_figures, "explained_variance": explained_variance(values, returns)}
        return Prepared(trained, figures, state)  # type: ignore[arg-type]

    def _final_scores(self, responses: Sequence[_Response], state: dict[str, float]) -> list[float]:
        """Scores as they are trained on."""
        scores = [response.score for response in responses]
        if self.normalize_scores:
            moments = RunningMoments.of(state).added(scores)
            state |= moments.state()
            scores = [(score - moments.mean) / (moments.deviation + 1e-8) for score in scores]
        if (bound := self.clip_scores) is not None:
            scores = [min(max(score, -bound), bound) for score in scores]
        # Nothing is bootstrapped behind a response that was cut: the penalty says plainly what that
        # costs.
        penalties = [
            self.missing_end_penalty if response.rollout.is_cut else 0.0 for response in responses
        ]
        return [score - penalty for score, penalty in zip(scores, penalties, strict=True)]

    def _rewards(
        self,
        context: StageContext,
        items: Sequence[Features],
        logps: Sequence[NDArray[np.float64]],
        scores: Sequence[float],
        state: dict[str, float],
    ) -> tuple[list[NDArray[np.float64]], dict[str, float]]:
        """The reward of each token: the penalty, and at the last one the score."""
        rewards, figures = [0.0 * logps_T for logps_T in logps], dict[str, float]()
        if self.kl_coefficient:
            outputs = context.compute(REFERENCE, items)
            reference_logps = [_array(of_response.logps) for of_response in outputs]
            pairs = zip(logps, reference_logps, strict=True)
            kls = [kl_estimates(policy, other, self.kl_estimator) for policy, other in pairs]
            coefficient = state.get("kl_coefficient", self.kl_coefficient)
            rewards = [-coefficient * kl for kl in kls]
            kl = math.fsum(float(kls_T.sum()) for kls_T in kls) / len(kls)
            figures = {"kl": kl, "kl_coefficient": coefficient}
            state |= self._adapted(coefficient, kl, len(kls))
        for reward, score in zip(rewards, scores, strict=True):
            reward[-1] += score
        if self.whiten_rewards:
            rewards = whitened(rewards, shift_mean=False)
        return rewards, figures

    def _adapted(self, coefficient: float, kl: float, count: int) -> dict[str, float]:
        """The state of an adaptive coefficient, for the next window."""
        if self.kl_target is None:
            return {}
        target, horizon = self.kl_target, self.kl_horizon
        adapted = adapted_coefficient(coefficient, kl, target=target, count=count, horizon=horizon)
        return {"kl_coefficient": adapted}

    def _advantages(
        self, rewards: Sequence[NDArray[np.float64]], values: Sequence[NDArray[np.float64]]
    ) -> list[NDArray[np.float64]]:
        return [
            generalized_advantages(r, v, gamma=self.gamma, gae_lambda=self.gae_lambda)
            for r, v in zip(rewards, values, strict=True)
        ]

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The clipped surrogate and the loss of the values, summed over tokens."""
        logps_N, values_N, extras = outputs.logps, outputs.values, batch.extras
        assert logps_N is not None
        assert values_N is not None
        old_N, advantages_N = (extras[name].to(logps_N) for name in ("old", "advantages"))
        before_N, returns_N = (extras[name].to(values_N) for name in ("old_values", "returns"))
        gains_N, is_clipped_N = clipped(logps_N, old_N, advantages_N, self.clip)
        errors_N = clipped_value_losses(values_N, before_N, returns_N, self.value_clip)
        total = -gains_N.sum() + self.value_coefficient * errors_N.sum()
        moved_N = (logps_N - old_N).detach()
        metrics = {
            "policy_loss": -gains_N.detach().sum(),
            "value_loss": errors_N.detach().sum(),
            "clip_ratio": is_clipped_N.to(logps_N).sum(),
            # Schulman's k3 (http://joschu.net/blog/kl-approx.html), never negative;
            # expm1() keeps its digits near 0.
            "policy_kl": (moved_N.expm1() - moved_N).sum(),
        }
        return Loss(total, (batch.labels != IGNORE_INDEX).sum(), metrics)

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Responses are the policy's own; heads are not sharded along ``tp`` or ``pp``."""
        yield from super().problems(data, parallel)
        message = "stage ppo has a head that cannot be sharded along {axis}; set it to 1"
        yield from must_not_shard(parallel, ("tp", "pp"), message)


def _array(values: torch.Tensor | None) -> NDArray[np.float64]:
    assert values is not None
    array: NDArray[np.float64] = values.double().numpy()
    return array


def _count_flat(state: dict[str, float], scores: Sequence[float], *, is_flat: bool) -> None:
    """Count the first windows whose scores are all equal. Raises ``RunError`` if they are many."""
    count = state.get("flat_windows", 0.0)
    if count < 0:
        return
    # -1 for good: once scores have differed, equal ones are no sign of a reward that cannot.
    state["flat_windows"] = count + 1 if is_flat else -1.0
    if count + 1 >= MAX_FLAT and is_flat:
        raise RunError(
            f"all scores of the first {counted(MAX_FLAT, 'window')} were equal (in the last one "
            f"{scores[0]:.4g}), and PPO learns nothing from equal scores; make the reward "
            "distinguish responses, raise the temperature, or train with sft first"
        )
