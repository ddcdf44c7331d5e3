"""What several stages have in common: rules for settings, and training on sampled responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..data.example import Encoded, Example
from ..data.section import DataSection
from ..generate.section import LEAST_TEMPERATURE, GenerateSection, sampling
from ..generate.servers import SAMPLERS, Engine, Sampler
from ..parallel.section import ParallelSection
from ..schema import FROM_HERE, Problem, Variants, must
from ..schema.locations import ModelPath
from ..training.conversations import SAMPLED
from ..training.rewards import (
    LEAST_SECONDS,
    OF_TEXT,
    REWARDS,
    Reward,
    RewardProcess,
    computed,
    last_responses,
)
from ..training.rollout import encode_prompts
from ..training.stage import Stage

if TYPE_CHECKING:
    from ..data.text.codec import Codec

REFERENCE = "reference"
USUAL_BATCH = 32  # of ``sampling_batch_size``


def without_effect(data: DataSection, names: Sequence[str], reason: str) -> Iterator[Problem]:
    """The problems of settings of ``data`` that are set, but have no effect for this ``reason``."""
    for name in names:
        if getattr(data, name):
            yield Problem(("data", name), f"has no effect with {reason}")


def must_not_shard(
    parallel: ParallelSection, axes: Sequence[str], message: str
) -> Iterator[Problem]:
    """The problems of ``axes`` that shard a model; ``message`` names ``{axis}``."""
    for axis in axes:
        if getattr(parallel, axis) > 1:
            yield Problem(("parallel", axis), message.format(axis=axis))


def check_temperature(name: str, temperature: float) -> None:
    """Raise ``ValueError`` if nothing can be sampled at the temperature with this name."""
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(f"{name} must be at least {LEAST_TEMPERATURE:g}, got {temperature}")


def check_sampler(sampler: Sampler, sampling_batch_size: int) -> None:
    """Raise ``ValueError`` for a setting of the engine's beside a server."""
    if sampler.server is not None and sampling_batch_size != USUAL_BATCH:
        raise ValueError(
            "sampling_batch_size has no effect with a server as sampler, which has a concurrency"
        )


@dataclass(frozen=True, kw_only=True)
class OnPolicy(Stage):
    """What stages have in common that train on the policy's own responses and their rewards."""

    metric: ClassVar[str] = "reward"  # the loss is about 0, whatever is learned
    row_metric: ClassVar[tuple[str, bool]] = ("reward", True)
    better_if_greater: ClassVar[Mapping[str, bool]] = SAMPLED
    encoding: ClassVar[str] = "1"

    reward: tuple[Annotated[Reward, Variants(REWARDS, OF_TEXT)], ...]
    """What rewards responses: a Python function such as ``rewards.py:exact_match``, or a list of
    rewards, such as a reward model of ``stage: rm``, which are added with their weights.
    """
    reward_timeout: float = 300.0
    """Seconds that a reward may take for all responses of a window. It is computed in a process of
    its own.
    """
    on_reward_error: Literal["stop", "skip"] = "stop"
    """When a reward raises, takes too long or gives no finite number: ``stop`` the run and name the
    row, or ``skip`` the response.
    """
    passes: int = 1
    """How often the responses of a window are trained on."""
    mini_batches: int = 1
    """Optimizer steps of each pass."""
    reference: ModelPath | None = None
    """Another reference model, a folder or a hub id, with the same tokenizer. Unset: the model
    before the first step: the base under a new adapter, otherwise a copy of the trained weights.
    """
    max_new_tokens: int = 256
    """Longest response in tokens; with an environment, of all its turns together."""
    temperature: float = 1.0
    """Temperature of sampling, and of the probabilities that are trained."""
    sampling_batch_size: int = USUAL_BATCH
    """Prompts per batch of one rank when the engine samples responses."""
    sampler: Annotated[Sampler, Variants(SAMPLERS), FROM_HERE] = Engine()
    """Where responses are sampled in training: by Surefoot's own ``engine``, or by a server
    (``vllm``, ``sglang``, ``openai``), which gets the weights after each update.
    """

    def __post_init__(self) -> None:
        if not self.reward:
            raise ValueError("reward: expected at least one")
        must(
            *(self, "be at least 1"),
            *("passes", "mini_batches", "max_new_tokens", "sampling_batch_size"),
        )
        must(self, "be positive", "reward_timeout", "temperature")
        check_temperature("temperature", self.temperature)
        check_sampler(self.sampler, self.sampling_batch_size)

    @property
    def sampling(self) -> GenerateSection:
        """How responses are sampled."""
        return sampling(self.max_new_tokens, self.temperature, self.sampling_batch_size)

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """The prompt of each row, up to its last response, and its columns for the reward."""
        return encode_prompts(examples, codec)

    def try_out(self, examples: Iterator[Example], process: RewardProcess) -> None:
        """Reward two responses, those of the first rows."""
        tasks = [reward.task for reward in self.reward if reward.task is not None]
        first = [*islice(examples, 2)] if tasks else []
        responses, seconds = last_responses(first), max(LEAST_SECONDS, self.reward_timeout)
        for task in tasks if first else ():
            computed(process, task, responses, seconds, self.on_reward_error)

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Responses are the policy's own."""
        reason = f"stage {type(self).__name__.lower()}, which trains on the policy's own responses"
        return without_effect(data, ("train_on_prompt", "mask_history"), reason)
