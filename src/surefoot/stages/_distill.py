"""Distillation: a student learns the next-token distributions of a teacher."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..batch import IGNORE_INDEX, Batch, Divergence, Features, Loss, Outputs, OutputSpec
from ..data.example import Encoded, Example
from ..data.section import DataSection
from ..data.text.collation import collate, num_trained, with_token_columns
from ..generate.section import GenerateSection, sampling
from ..generate.servers import SAMPLERS, Engine, Sampler
from ..parallel.section import ParallelSection
from ..schema import FROM_HERE, Needs, Problem, Variants, must
from ..schema.locations import ModelPath
from ..training.losses import LIKELIHOOD, means_of_rows
from ..training.stage import AuxiliaryModel, Prepared, Stage, StageContext
from ._rules import check_sampler, check_temperature, must_not_shard
from ._sft import SFT

if TYPE_CHECKING:
    from ..data.text.codec import Codec
    from ..generate.generation import Sample

TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True)
class Distill(Stage):
    """Train a student on the full next-token distributions of a teacher with the same tokenizer:
    on the responses of the dataset, on the student's own, or both (GKD, arXiv:2306.13649).

    The teacher stays in memory beside the student and computes with every micro-batch; the logits
    of a batch never exist at once. The loss is a sum over the tokens of responses.
    """

    better_if_greater: ClassVar[Mapping[str, bool]] = LIKELIHOOD
    reads_pairs = False
    encoding: ClassVar[str] = SFT.encoding
    row_metric: ClassVar[tuple[str, bool]] = ("divergence", False)

    teacher: ModelPath | None = None
    """The teacher, a folder or a hub id, with the same tokenizer. Unset: the model before the first
    step, which with an adapter is its base and needs no second model; it keeps the student near to
    its start, and needs ``sft_weight``.
    """
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """What is minimized at each token. ``forward_kl`` is KL(teacher || student): the student covers
    everything that the teacher may say. ``reverse_kl`` is KL(student || teacher): the student says
    only what the teacher may say. ``jsd`` is between both, and bounded."""
    beta: Annotated[float, Needs("divergence", ("jsd",))] = 0.5
    """``jsd`` only: the share of the teacher in the mixture that both are compared with. Near 0 it
    behaves like ``forward_kl``, near 1 like ``reverse_kl``."""
    temperature: float = 1.0
    """The logits of both models are divided by it before they are compared."""
    sft_weight: float = 0.0
    """Weight of the cross entropy of the dataset's responses, which is added to the divergence."""
    on_policy: float = 0.0
    """The share of examples whose last response is replaced by the student's own, sampled before
    each step (``lambda`` of GKD). 0: none, 1: all."""
    max_new_tokens: int = 0
    """Longest response of the student in tokens; needed with ``on_policy``."""
    sampling_temperature: Annotated[float, Needs("on_policy")] = 1.0
    """Temperature with which the student samples its responses."""
    sampling_batch_size: Annotated[int, Needs("on_policy")] = 32
    """Prompts per batch of one rank when the engine samples responses."""
    sampler: Annotated[Sampler, Variants(SAMPLERS), FROM_HERE] = Engine()
    """Where responses are sampled in training: by Surefoot's own ``engine``, or by a server
    (``vllm``, ``sglang``, ``openai``), which gets the weights after each update.
    """

    def __post_init__(self) -> None:
        must(self, "be positive", "temperature", "sampling_temperature")
        must(self, "not be negative", "sft_weight")
        must(self, "be at least 1", "sampling_batch_size")
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta must be between 0 and 1, got {self.beta}; the ends are divergence: "
                "forward_kl and reverse_kl"
            )
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy must be in [0, 1], got {self.on_policy}")
        if self.on_policy and self.max_new_tokens < 1:
            raise ValueError(
                "max_new_tokens must be at least 1 with on_policy, as the student answers; "
                f"got {self.max_new_tokens}"
            )
        check_temperature("sampling_temperature", self.sampling_temperature)
        check_sampler(self.sampler, self.sampling_batch_size)
        if self.sampler.server is not None and not self.on_policy:
            raise ValueError("sampler has no effect without on_policy")
        if self.max_new_tokens and not self.on_policy:
            raise ValueError(
                "max_new_tokens has no effect without on_policy, the share of examples that the "
                "student answers; leave it out, or set on_policy"
            )

    @property
    def _compared(self) -> Divergence:
        return Divergence(TEACHER, self.divergence, self.beta, self.temperature)

    @property
    def spec(self) -> OutputSpec:
        """Divergences from the teacher, and log-probabilities of labels if they count."""
        names = ("divergences", "logps") if self.sft_weight else ("divergences",)
        return OutputSpec(names, divergence=self._compared)

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """The teacher."""
        return {TEACHER: AuxiliaryModel(OutputSpec(("logps",)), self.teacher, when="window")}

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render conversations with the chat template; the responses are trained."""
        return SFT().encode(examples, codec)

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack examples into one row, or pad them to a rectangle."""
        batch = collate(features, packing=packing)
        return with_token_columns(batch, features, ["of_dataset"])

    def prepare(self, context: StageContext, examples: Sequence[Features]) -> Prepared:
        """Let the student answer its share of the window's prompts."""
        rows = sampled_rows(len(examples), self.on_policy, context.seed)
        if not self.on_policy:
            return Prepared(examples)
        prompts = [prompt_of(examples[row]) for row in rows]
        samples = context.generate(prompts, self._sampling) if prompts else []
        answered = {
            row: _answered(prompt, sample)
            for row, prompt, sample in zip(rows, prompts, samples, strict=True)
        }
        window = [answered.get(row) or _marked(item) for row, item in enumerate(examples)]
        # A student that ends at once leaves no token to compare.
        return Prepared([item for item in window if num_trained(item)], _figures(samples))

    @property
    def _sampling(self) -> GenerateSection:
        return sampling(self.max_new_tokens, self.sampling_temperature, self.sampling_batch_size)

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The divergence at each token, and the cross entropy of the tokens of the dataset,
        summed."""
        assert outputs.divergences is not None
        divergences_N = outputs.divergences
        total = divergences_N.sum()
        metrics = {"divergence": total.detach()}
        if self.sft_weight:
            assert outputs.logps is not None
            logps_N = outputs.logps
            # The student's own tokens are no example to imitate: of them the divergence alone
            # counts.
            if (of_dataset_N := batch.extras.get("of_dataset")) is not None:
                logps_N = logps_N * of_dataset_N.to(logps_N)
            cross_entropy = -logps_N.sum()
            total = total + self.sft_weight * cross_entropy
            metrics["sft_loss"] = cross_entropy.detach()
        weight = (batch.labels[:, 1:] != IGNORE_INDEX).sum()
        return Loss(total, weight, metrics, means_of_rows(divergences_N, batch))

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """A student differs from its teacher. Two distributions are compared on one rank; the
        student's responses replace others."""
        if self.teacher is None and not self.sft_weight:
            message = (
                "expected a model: without one, the teacher is the student before the first step, "
                "and with sft_weight 0 nothing can be learned from it; name a teacher, or set "
                "stage.distill.sft_weight"
            )
            yield Problem(("stage", "distill", "teacher"), message)
        if self.on_policy and data.train_on_prompt:
            message = (
                "stage distill with on_policy replaces last responses, and where prompts are "
                "trained on, no label says where one begins; leave one of the two out"
            )
            yield Problem(("data", "train_on_prompt"), message)
        message = (
            "stage distill compares all logits of a token on one rank, and {axis} shards a model "
            "so that no rank has them; set it to 1, and use parallel.dp_shard"
        )
        yield from must_not_shard(parallel, ("tp", "pp"), message)


def sampled_rows(count: int, share: float, seed: int) -> list[int]:
    """The rows of a window of ``count`` that the student answers, a function of ``seed``: their
    number is ``share`` of the window, rounded at random so that it is so on average."""
    draw = random.Random(seed)
    mean_number = count * share
    number = math.floor(mean_number) + (draw.random() < mean_number - math.floor(mean_number))
    return sorted(draw.sample(range(count), number))


def prompt_of(item: Features) -> list[int]:
    """The tokens before the last response: before the last run of labels."""
    labels = [int(label) for label in item["labels"]]
    last = next(i for i in range(len(labels) - 1, -1, -1) if labels[i] != IGNORE_INDEX)
    first = next((i + 1 for i in range(last, -1, -1) if labels[i] == IGNORE_INDEX), 0)
    return [int(token) for token in item["input_ids"][: max(1, first)]]


def _answered(prompt: Sequence[int], sample: Sample) -> Features:
    return {
        "input_ids": [*prompt, *sample.ids],
        "labels": [*[IGNORE_INDEX] * len(prompt), *sample.ids],
        "of_dataset": [0] * len(sample.ids),
    }


def _marked(item: Features) -> Features:
    columns = {name: [int(x) for x in item[name]] for name in ("input_ids", "labels")}
    return {**columns, "of_dataset": [1] * num_trained(item)}


def _figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of a window."""
    if not samples:
        return {}
    lengths = [len(sample.ids) for sample in samples]
    return {
        "completion_length": sum(lengths) / len(lengths),
        "completions_clipped": sum(s.finish_reason != "stop" for s in samples) / len(samples),
    }
