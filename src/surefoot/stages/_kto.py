"""Kahneman-Tversky optimization: raise desirable responses, lower undesirable ones, each alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from ..batch import IGNORE_INDEX, Batch, Features, Loss, Outputs, OutputSpec
from ..data.example import EMPTY, Dropped, Encoded, Example, Truncated
from ..data.rows.formats.fields import MARKS
from ..data.section import DataSection
from ..data.text.collation import collate, pictures_of, with_columns, with_owners
from ..data.text.ranking import RANKED, answered, is_ranked, labeled, up_to_last_label
from ..parallel.section import ParallelSection
from ..schema import Problem, must
from ..schema.locations import ModelPath
from ..training import losses
from ..training.stage import POLICY, AuxiliaryModel, Prepared, Stage, StageContext
from ._rules import without_effect

if TYPE_CHECKING:
    import torch

    from ..data.store.dataset import EncodedDataset
    from ..data.text.codec import Codec

logger = logging.getLogger(__name__)
LOGPS = OutputSpec(("logps",))
UNLABELED = Dropped(
    "neither desirable nor undesirable: expected a column 'label' with true or false, 1 or 0 "
    "(of another name: columns: {kto_tag: ...} in the entry of the dataset)"
)

NO_RESPONSE = Dropped("no response at the end of the conversation")

LEAST_RATIO, MOST_RATIO = 1.0, 4 / 3  # of weight times number, of desirable and other responses


@dataclass(frozen=True, kw_only=True)
class KTO(Stage):
    """Train on answers that are marked desirable or undesirable (arXiv:2402.01306), by how much
    likelier the model makes each than a reference does: the model as it was before the first step.

    The baseline ``kl`` compares both on mismatched pairs: each prompt with the answer of the
    example before it in the global batch, which has two or more. Log-probabilities of the reference
    are computed for all batches of the run before the first step, and kept; other epochs, batch
    sizes or seeds add some.
    """

    better_if_greater: ClassVar[Mapping[str, bool]] = losses.PAIRS
    reads_pictures = True
    row_columns = frozenset(MARKS)
    kept_by: ClassVar[Literal["item", "window"]] = "window"
    spec: ClassVar[OutputSpec] = LOGPS

    beta: float = 0.1
    """Scale of the log-ratios: a small value lets the model move far from the reference."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """``apo_zero_unpaired`` (arXiv:2408.06266) is ``kto`` without its baseline, for desirable
    responses that are better than the model's own.
    """
    desirable_weight: float = 1.0
    """Weight of the loss of desirable responses. If one kind is more frequent, choose weights so
    that weight times number is about equal.
    """
    undesirable_weight: float = 1.0
    """Weight of the loss of undesirable responses."""
    reference: ModelPath | None = None
    """Another reference model, a folder or a hub id, with the same tokenizer. Unset: the model
    before the first step.
    """
    precompute_reference: bool = True
    """Whether the reference's log-probabilities are computed before the first step and cached. If
    not, the reference stays, and computes with each global batch: with an adapter that is new it is
    the base, which needs no second model. Then the data may be streamed.
    """

    def __post_init__(self) -> None:
        must(self, "be positive", "beta")
        must(self, "not be negative", "desirable_weight", "undesirable_weight")

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """The reference."""
        when: Literal["ahead", "window"] = "ahead" if self.precompute_reference else "window"
        return {"reference": AuxiliaryModel(LOGPS, self.reference, when)}

    @property
    def min_window(self) -> int:
        """Two rows, or each would be its own mismatched pair."""
        return 2 if self.loss_type == "kto" else 1

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render conversations with the chat template; the last response is trained."""
        examples = [labeled(example) for example in examples]
        reasons = [_why_not(example) for example in examples]
        pairs = [*zip(examples, reasons, strict=True)]
        encoded = iter(codec.encode_chats([_last_answer(e) for e, why in pairs if not why]))
        return [why or _labeled(next(encoded), is_good=bool(e.label)) for e, why in pairs]

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack examples into one row, or pad them to a rectangle."""
        batch = with_owners(collate(features, packing=packing), features)
        return with_columns(batch, features, ["reference", "desirable", "z", "scale"])

    def precompute(self, context: StageContext, examples: Sequence[Features]) -> Sequence[Features]:
        """Add what the reference computes, unless it does so in each window."""
        return self._compared(context, examples) if self.precompute_reference else examples

    def _compared(self, context: StageContext, examples: Sequence[Features]) -> list[Features]:
        """With the reference's log-probability of each response, and of its mismatched one."""
        matched = context.reduce("reference", examples, log_probabilities)
        pairs = mismatched(examples, context.codec.section.longest)
        of_pairs = context.reduce("reference", pairs, log_probabilities)
        return [
            {**item, "reference": [a], "mismatched_reference": [b]}
            for item, a, b in zip(examples, matched.tolist(), of_pairs.tolist(), strict=True)
        ]

    def prepare(self, context: StageContext, examples: Sequence[Features]) -> Prepared:
        """The baseline of the window, and how many of its responses are of each kind. A single row
        at the end of a stream's epoch is skipped, as nothing is there to compare it with."""
        if len(examples) < self.min_window:
            logger.warning("stage.kto: a window of one row is skipped: it has no mismatched pair")
            return Prepared(())
        if not self.precompute_reference:
            examples = self._compared(context, examples)
        z = self._baseline(context, examples) if self.loss_type == "kto" else 0.0
        kinds = [int(item["desirable"][0]) for item in examples]
        # Metrics are divided by all responses of the step. Scaled so, they are means of their kind.
        scales = [len(kinds) / kinds.count(kind) for kind in kinds]
        with_baseline: list[Features] = [
            {**item, "z": [z], "scale": [scale]}  # type: ignore[list-item]
            for item, scale in zip(examples, scales, strict=True)
        ]
        return Prepared(with_baseline, {"kl": z} if self.loss_type == "kto" else {})

    def _baseline(self, context: StageContext, examples: Sequence[Features]) -> float:
        """How much likelier the model makes mismatched responses than the reference does."""
        pairs = mismatched(examples, context.codec.section.longest)
        policy = context.reduce(POLICY, pairs, log_probabilities).tolist()
        both = zip(policy, examples, strict=True)
        ratios = [logp - float(item["mismatched_reference"][0]) for logp, item in both]
        # The paper bounds the divergence by 0 from below, which an estimate of few pairs may fall
        # short of.
        return max(0.0, float(sum(ratios)) / len(ratios))

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The loss of each response, summed; metrics are means over the responses of a kind."""
        extras, logps_E = batch.extras, log_probabilities(outputs, batch)
        is_good_E, is_there_E = extras["desirable"] > 0, extras["lengths"] > 0
        ratios_E = logps_E - extras["reference"].to(logps_E)
        losses_E = losses.kto(ratios_E, is_good_E, extras["z"].to(logps_E), self.beta)
        weights_E = self.undesirable_weight + (
            self.desirable_weight - self.undesirable_weight
        ) * is_good_E.to(losses_E)
        zero, scaled_E = losses_E.new_zeros(()), extras["scale"].to(logps_E) * is_there_E

        def mean_of(values_E: torch.Tensor, is_kind_E: torch.Tensor) -> torch.Tensor:
            return (values_E.detach() * scaled_E).where(is_kind_E, zero).sum()

        rewards_E = self.beta * ratios_E
        metrics = {
            f"{name}/{kind}": mean_of(values_E, is_kind_E)
            for name, values_E in (("rewards", rewards_E), ("logps", logps_E))
            for kind, is_kind_E in (("chosen", is_good_E), ("rejected", ~is_good_E))
        }
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        total = (weights_E * losses_E).where(is_there_E, zero).sum()
        return Loss(total, is_there_E.sum(), metrics, losses_E.detach().float())

    def remarks(
        self, examples: EncodedDataset, evals: Mapping[str, EncodedDataset]
    ) -> Iterator[str]:
        """Kinds of responses whose weights are not balanced."""
        num_good, start = 0, 0
        for store in examples.stores:
            items = examples.index[
                (examples.index >= start) & (examples.index < start + len(store))
            ]
            num_good += int((store.features["desirable"].flat[:][items - start] > 0).sum())
            start += len(store)
        num_bad = len(examples) - num_good
        if not num_good or not num_bad:
            kind = "desirable" if num_good else "undesirable"
            yield f"stage.kto: all {len(examples):,} examples are {kind}, and it learns from both"
            return
        ratio = self.desirable_weight * num_good / max(1e-30, self.undesirable_weight * num_bad)
        if LEAST_RATIO <= ratio <= MOST_RATIO:
            return
        good = [self.undesirable_weight * num_bad / num_good * r for r in (LEAST_RATIO, MOST_RATIO)]
        bad = [self.desirable_weight * num_good / num_bad / r for r in (MOST_RATIO, LEAST_RATIO)]
        yield (
            f"stage.kto: {num_good:,} desirable examples of weight {self.desirable_weight:g} and "
            f"{num_bad:,} undesirable ones of weight {self.undesirable_weight:g} are not balanced: "
            f"weight times number has the ratio {ratio:.3g}, and should have 1 to 4/3 "
            f"(arXiv:2402.01306). Set desirable_weight from {good[0]:.3g} to {good[1]:.3g}, or "
            f"undesirable_weight from {bad[0]:.3g} to {bad[1]:.3g}"
        )

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Only the last response is marked; the reference may compute before the first step."""
        reason = "stage kto, which trains on last responses"
        yield from without_effect(data, ("train_on_prompt", "mask_history"), reason)
        if data.streaming and self.precompute_reference:
            message = (
                "stage kto computes reference log-probabilities of all batches before the first "
                "step; leave it off, or set stage.kto.precompute_reference: false"
            )
            yield Problem(("data", "streaming"), message)


def log_probabilities(outputs: Outputs, batch: Batch) -> torch.Tensor:
    """[E] log-probability of the response of each example."""
    assert outputs.logps is not None
    extras = batch.extras
    return losses.sums_of_answers(outputs.logps, extras["owner"], len(extras["lengths"]))


def mismatched(examples: Sequence[Features], cutoff_len: int) -> list[Features]:
    """Each prompt of a window with the response of the example before it (the first: of the last),
    up to its end token, and cut like an example."""
    parts = [_split(item) for item in examples]
    pairs: list[Features] = []
    answers = [answer for _, answer in (parts[-1], *parts[:-1])]
    for item, (prompt, _), answer in zip(examples, parts, answers, strict=True):
        labels = [IGNORE_INDEX] * len(prompt) + answer
        ids = prompt + answer
        pair: Features = {"input_ids": ids[:cutoff_len], "labels": labels[:cutoff_len]}
        pairs.append({**pair, **pictures_of(item)})
    return pairs


def _split(item: Features) -> tuple[list[int], list[int]]:
    """Prompt and response, without what the template writes after it: that is never trained."""
    # ChatML writes a newline after the end token, for one. TRL compares up to the end token, and a
    # tail that is never trained would shift the baseline.
    ids = [int(x) for x in up_to_last_label(item)["input_ids"]]
    labels = item["labels"]
    # From 1 on: nothing predicts the first token of a row, so its label does not count.
    first = next(i for i in range(1, len(labels)) if labels[i] != IGNORE_INDEX)
    return ids[:first], ids[first:]


def _why_not(example: Example) -> Dropped | None:
    if is_ranked(example):
        return RANKED
    if example.label is None or not example.messages:
        return UNLABELED
    if example.messages[-1].role != "assistant":
        return NO_RESPONSE
    return EMPTY if example.messages[-1].is_empty else None


def _last_answer(example: Example) -> Example:
    """The conversation of which only the last message is trained on."""
    *before, last = example.messages
    return answered(replace(example, messages=tuple(before)), last)


def _labeled(outcome: Encoded, *, is_good: bool) -> Encoded:
    if isinstance(outcome, Dropped):
        return outcome
    items = outcome.features if isinstance(outcome, Truncated) else outcome
    with_label = [{**items[-1], "desirable": [int(is_good)]}]
    return Truncated(with_label) if isinstance(outcome, Truncated) else with_label
