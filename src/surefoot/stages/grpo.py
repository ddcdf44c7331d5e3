"""Group relative policy optimization: raise sampled responses that are better than their group."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..batch import IGNORE_INDEX, Batch, Features, Loss, Outputs, OutputSpec
from ..data.encoded import Dropped, Encoded, Truncated
from ..data.example import Example
from ..data.section import DataSection
from ..data.text.collation import collate, with_owners, with_token_columns
from ..generate.section import GenerateSection
from ..parallel.section import ParallelSection
from ..schema import Problem
from ..schema.locations import FunctionPath
from ..training.objectives.policy_gradient import clipped, group_advantages
from ..training.stage import (
    POLICY,
    AuxiliaryModel,
    Prepared,
    StageContext,
    as_measured,
    no_columns,
    no_remarks,
)
from .rules import without_effect

if TYPE_CHECKING:
    from ..data.text.codec import Codec
    from ..generate.generation import Sample


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Train on the policy's own responses by the reward of each, compared with the other responses
    to the same prompt (arXiv:2402.03300), without a KL term.

    ``train.global_batch_size`` counts prompts: a global batch of 16 prompts is a window of 16 x
    ``group_size`` responses, trained on in ``passes`` x ``mini_batches`` optimizer steps. A window
    whose groups all have equal rewards is skipped.
    """

    uses_template: ClassVar[bool] = True
    encoding: ClassVar[str] = ""
    heads: ClassVar[Sequence[str]] = ()
    kept_by: ClassVar[Literal["item", "window"]] = "item"
    auxiliary: ClassVar[Mapping[str, AuxiliaryModel]] = {}
    precompute = no_columns
    metrics = as_measured
    remarks = no_remarks

    reward: FunctionPath
    """The function that rewards responses, such as ``rewards.py:exact_match``. It is called with
    ``prompts``, ``completions`` and the columns of the dataset, as lists, and returns a number
    for each completion, or null for one that does not count.
    """
    group_size: int = 8
    """Responses to each prompt."""
    passes: int = 1
    """How often the responses of a window are trained on."""
    mini_batches: int = 1
    """Optimizer steps of each pass."""
    clip: float = 0.2
    """By how much the probability ratio of a token may change before its gradient is clipped."""
    max_new_tokens: int = 256
    """Longest response in tokens."""
    temperature: float = 1.0
    """Temperature of sampling, and of the probabilities that are trained."""
    sampling_batch_size: int = 32
    """Prompts per batch of one rank when responses are sampled."""

    def __post_init__(self) -> None:
        for name in ("passes", "mini_batches", "max_new_tokens", "sampling_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {self.group_size}")
        if not 0 < self.clip < 1:
            raise ValueError(f"clip must be between 0 and 1, got {self.clip}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    @property
    def spec(self) -> OutputSpec:
        """Log-probabilities under the distribution that is sampled from."""
        return OutputSpec(("logps",), temperature=self.temperature)

    @property
    def eval_spec(self) -> OutputSpec:
        """The same."""
        return self.spec

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """The prompt of each row, up to its last response, and its columns for the reward."""
        pairs = zip(examples, codec.encode_prompts(examples), strict=True)
        return [_with_row(outcome, example) for example, outcome in pairs]

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack prompts with their responses into one row, or pad them to a rectangle."""
        batch = with_owners(collate(features, packing=packing), features)
        return with_token_columns(batch, features, ["old", "advantages"])

    def prepare(self, context: StageContext, examples: Sequence[Features]) -> Prepared:
        """Sample a group of responses to each prompt, reward them, and compare them."""
        rows = [json.loads(bytes(int(x) for x in item["row"])) for item in examples]
        pairs = zip(examples, rows, strict=True)
        repeated = [pair for pair in pairs for _ in range(self.group_size)]
        prompts = [[int(x) for x in item["input_ids"]] for item, _ in repeated]
        samples = context.generate(prompts, self._sampling)
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for _, row in repeated] for name in names}
        rewards = context.score(self.reward, prompts, samples, columns)
        starts = range(0, len(rewards), self.group_size)
        groups = [rewards[start : start + self.group_size] for start in starts]
        advantages = [a for group in groups for a in group_advantages(group)]
        figures = _figures(rewards, groups, samples)
        if figures["flat_groups"] == 1:
            return Prepared((), figures)
        found = [
            _answered(prompt, sample, advantage)
            for prompt, sample, advantage in zip(prompts, samples, advantages, strict=True)
            if sample.ids
        ]
        return Prepared(self._with_old(context, found), figures)

    def _with_old(self, context: StageContext, found: list[Features]) -> list[Features]:
        """With the log-probabilities before the first of several steps: in a single step they are
        those of the step itself."""
        if self.passes * self.mini_batches == 1:
            return found
        outputs = context.compute(POLICY, found)
        pairs = zip(found, outputs, strict=True)
        return [{**item, "old": one.logps} for item, one in pairs]  # type: ignore[dict-item]

    @property
    def _sampling(self) -> GenerateSection:
        return GenerateSection(
            max_new_tokens=self.max_new_tokens,
            do_sample=True,
            temperature=self.temperature,
            batch_size=self.sampling_batch_size,
        )

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The clipped surrogate, a mean over the tokens of each response, summed over responses."""
        assert outputs.logps is not None
        logps_N, extras = outputs.logps, batch.extras
        advantages_N = extras["advantages"].to(logps_N)
        old_N = extras["old"].to(logps_N) if "old" in extras else logps_N.detach()
        shares_N = 1 / extras["lengths"][extras["owner"]].to(logps_N)
        gains_N, is_clipped_N = clipped(logps_N, old_N, advantages_N, self.clip)
        total = -(gains_N * shares_N).sum()
        weight = (extras["lengths"] > 0).sum()
        return Loss(total, weight, {"clip_ratio": (is_clipped_N * shares_N).sum().detach()})

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Responses are the policy's own, which a pipeline cannot sample."""
        reason = "stage grpo, which trains on the policy's own responses"
        yield from without_effect(data, ("train_on_prompt", "mask_history"), reason)
        if parallel.pp > 1:
            message = "stage grpo cannot sample from a pipeline; set it to 1"
            yield Problem(("parallel", "pp"), message)


def _with_row(outcome: Encoded, example: Example) -> Encoded:
    if isinstance(outcome, Dropped | Truncated):
        return outcome
    row = json.dumps(example.columns, default=str).encode()
    return [{**item, "row": row} for item in outcome]


def _answered(prompt: Sequence[int], sample: Sample, advantage: float) -> Features:
    labels = [*[IGNORE_INDEX] * len(prompt), *sample.ids]
    advantages = [advantage] * len(sample.ids)
    return {
        "input_ids": [*prompt, *sample.ids],
        "labels": labels,
        "advantages": advantages,  # type: ignore[dict-item]
    }


def _figures(
    rewards: Sequence[float | None],
    groups: Sequence[Sequence[float | None]],
    samples: Sequence[Sample],
) -> dict[str, float]:
    """Metrics of a window."""
    known = [reward for reward in rewards if reward is not None]
    mean = math.fsum(known) / max(1, len(known))
    spread = math.fsum((reward - mean) ** 2 for reward in known) / max(1, len(known) - 1)
    is_flat = [len({reward for reward in group if reward is not None}) < 2 for group in groups]
    lengths = [len(sample.ids) for sample in samples]
    return {
        "reward": mean,
        "reward_std": math.sqrt(spread),
        "flat_groups": sum(is_flat) / len(is_flat),
        "completion_length": sum(lengths) / len(lengths),
        "completions_clipped": sum(s.finish_reason != "stop" for s in samples) / len(samples),
    }
