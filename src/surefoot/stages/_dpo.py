"""Direct preference optimization: raise the chosen response above the rejected one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from ..batch import Batch, Features, Loss, Outputs, OutputSpec
from ..data.example import Encoded, Example
from ..data.section import DataSection
from ..data.text.collation import collate_pairs
from ..data.text.ranking import encode_pairs
from ..parallel.section import ParallelSection
from ..schema import Problem, must
from ..schema.locations import ModelPath
from ..training import losses
from ..training.losses import LOSSES, PairLoss, Pairs
from ..training.stage import AuxiliaryModel, Stage, StageContext
from ._rules import without_effect

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ..data.text.codec import Codec

LOGPS = OutputSpec(("logps",))
if TYPE_CHECKING:
    LossType = str
else:  # the names that a recipe may give
    LossType = Literal[tuple(LOSSES)]


@dataclass(frozen=True, kw_only=True)
class DPO(Stage):
    """Train on preference pairs (arXiv:2305.18290): make the chosen response more likely than the
    rejected one, relative to a reference model, which by default is the model before the first
    step.

    Reference log-probabilities are computed once, before the first step, and cached with the
    encoded datasets; training needs no second model.

    The loss is a sum over pairs, and its weight is their number. Rewards are ``beta`` times the
    difference between the policy's and the reference's log-probability of a response.
    """

    better_if_greater: ClassVar[Mapping[str, bool]] = losses.PAIRS
    reads_pictures = True
    row_metric: ClassVar[tuple[str, bool]] = ("margin", True)
    spec: ClassVar[OutputSpec] = LOGPS

    beta: float = 0.1
    """Scale of the log-ratios: a small value lets the model move far from the reference. For
    ``orpo`` the weight of the odds ratio. Usual is 0.1 (``simpo``: 2).
    """
    loss_type: LossType = "sigmoid"
    """``sigmoid`` is DPO's own; ``docs/how-to/preferences.md`` has a table. ``cpo``, ``orpo`` and
    ``simpo`` need no reference. ``ipo``, ``sigmoid_norm``, ``orpo`` and ``simpo`` use
    log-probabilities per token.
    """
    losses: Mapping[str, float] = field(default_factory=dict)
    """A weighted sum of losses in place of ``loss_type``: ``{sigmoid: 0.8, bco_pair: 0.2}``
    (arXiv:2411.10442).
    """
    label_smoothing: float = 0.0
    """The share of pairs that are assumed to be labeled the wrong way round. For ``sigmoid``,
    ``sigmoid_norm`` and ``cpo`` (cDPO), ``robust`` and ``exo_pair``, which needs it.
    """
    gamma: float = 0.5
    """``simpo`` only: the target margin of the rewards."""
    ld_alpha: float = 1.0
    """Weight of the log-probabilities of the tokens by which a response is longer than the other
    one of its pair (LD-DPO, arXiv:2409.06411): below 1, long responses are preferred less for their
    length alone. For losses with a reference.
    """
    sft_weight: float = 0.0
    """Weight of the ``sft`` loss on the chosen response, the mean over its tokens."""

    reference: ModelPath | None = None
    """Another reference model, a folder or a hub id, with the same tokenizer. Unset: the model
    before the first step.
    """

    def __post_init__(self) -> None:
        must(self, "be positive", "beta")
        must(self, "not be negative", "gamma", "sft_weight")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), got {self.label_smoothing}")
        self._check_losses()
        loss_setting = (
            f"losses: {', '.join(self.losses)}" if self.losses else f"loss_type: {self.loss_type}"
        )
        used = {name for loss, _ in self._parts for name in loss.settings}
        for name in ("label_smoothing", "gamma"):
            if getattr(self, name) != getattr(DPO, name) and name not in used:
                raise ValueError(f"{name} has no effect with {loss_setting}")
        if not self.label_smoothing and "exo_pair" in self._weights:
            raise ValueError("label_smoothing: exo_pair needs a positive one, such as 0.001")
        if self.reference is not None and not self.compares:
            raise ValueError(f"reference has no effect with {loss_setting}")

    def _check_losses(self) -> None:
        if self.losses and self.loss_type != DPO.loss_type:
            raise ValueError(f"loss_type: {self.loss_type} has no effect with losses")
        for name, weight in self.losses.items():
            if name not in LOSSES:
                raise ValueError(f"losses: expected some of {', '.join(LOSSES)}, got {name!r}")
            if weight <= 0:
                raise ValueError(f"losses: the weight of {name} must be positive, got {weight}")
        if not 0 <= self.ld_alpha <= 1:
            raise ValueError(f"ld_alpha must be in [0, 1], got {self.ld_alpha}")
        alone = [name for name in self._weights if not LOSSES[name].needs_reference]
        if self.ld_alpha < 1 and alone:
            raise ValueError(f"ld_alpha has no effect with {alone[0]}, which has no reference")

    @property
    def _weights(self) -> Mapping[str, float]:
        return self.losses or {self.loss_type: 1.0}

    @property
    def _parts(self) -> Sequence[tuple[PairLoss, float]]:
        return [(LOSSES[name], weight) for name, weight in self._weights.items()]

    @property
    def compares(self) -> bool:
        """Whether a loss needs reference log-probabilities."""
        return any(loss.needs_reference for loss, _ in self._parts)

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """The reference, if the loss needs one."""
        return {"reference": AuxiliaryModel(LOGPS, self.reference)} if self.compares else {}

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render both conversations of each row with the template; the responses are trained."""
        return encode_pairs(examples, codec)

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack pairs, each prompt once, or pad them to a rectangle."""
        import torch

        batch, extras = collate_pairs(features, packing=packing), dict[str, torch.Tensor]()
        for name in ("reference", "reference_tail"):
            if all(name in item for item in features):
                values = [float(value) for item in features for value in item[name]]
                extras[name] = torch.tensor(values, dtype=torch.float32)
        return replace(batch, extras={**batch.extras, **extras})

    def precompute(self, context: StageContext, examples: Sequence[Features]) -> Sequence[Features]:
        """Add ``reference``: the log-probabilities of the chosen and the rejected answer, and
        ``reference_tail``, those of the tokens by which one is longer."""
        sums_P22 = context.reduce("reference", examples, self.sums).astype("float32")
        return [
            {**item, "reference": row[0], "reference_tail": row[1]}
            for item, row in zip(examples, sums_P22, strict=True)
        ]

    def answers(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """[P, 2] log-probability of the chosen and the rejected response of each pair."""
        assert outputs.logps is not None
        extras = batch.extras
        sums = losses.sums_of_answers(
            outputs.logps, extras["answer"], len(extras["answer_lengths"])
        )
        return sums.view(-1, 2)

    def sums(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """[P, 2, 2] of chosen and rejected response the log-probability, and its part of the tokens
        by which a response is longer than the other."""
        import torch

        return torch.stack([self.answers(outputs, batch), self.tails(outputs, batch)], dim=1)

    def tails(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """[P, 2] log-probability of the tokens by which a response is longer than the other."""
        assert outputs.logps is not None
        extras, logps_N = batch.extras, outputs.logps
        is_tail_N = losses.is_tail(extras["answer"], extras["answer_lengths"])
        tails_N = logps_N.where(is_tail_N, logps_N.new_zeros(()))
        return self.answers(replace(outputs, logps=tails_N), batch)

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The loss of each pair, summed; a pair without labels has no weight."""
        answers_P2, lengths_P2 = self.answers(outputs, batch), batch.extras["answer_lengths"]
        lengths_P2 = lengths_P2.view(-1, 2)
        is_there_P = (lengths_P2 > 0).all(1)
        # A rank that has run out of examples has pairs without labels: 0 / 0 there would reach
        # every gradient as NaN, also through where().
        counts_P2 = lengths_P2.clamp(min=1)
        likelihood_P = -answers_P2[:, 0] / counts_P2[:, 0]
        logps_P2 = self._without_tails(answers_P2, lambda: self.tails(outputs, batch))
        means_P2, reference_P2 = logps_P2 / counts_P2, self._reference(batch)

        def relative(loss: PairLoss) -> torch.Tensor:
            scores_P2 = means_P2 if loss.per_token else logps_P2
            if reference_P2 is None or not loss.needs_reference:
                return scores_P2
            return scores_P2 - (reference_P2 / counts_P2 if loss.per_token else reference_P2)

        losses_P = self.sft_weight * likelihood_P
        for loss, weight in self._parts:
            pairs = self._pairs(relative(loss), likelihood_P)
            losses_P = losses_P + weight * loss.compute(pairs)
        first = self._parts[0][0]
        logged_P2 = means_P2 if first.per_token else logps_P2
        metrics = _metrics(self.beta * relative(first).detach(), logged_P2.detach())
        margins_P = metrics["rewards/margins"].float()
        if self.sft_weight or any(loss.has_likelihood for loss, _ in self._parts):
            metrics["sft_loss"] = likelihood_P.detach()

        def summed(values_P: torch.Tensor) -> torch.Tensor:
            return values_P.where(is_there_P, values_P.new_zeros(())).sum()

        sums = {name: summed(values) for name, values in metrics.items()}
        return Loss(summed(losses_P), is_there_P.sum(), sums, margins_P)

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Both responses are trained; the reference computes before the first step."""
        reason = "stage dpo, which trains on last responses"
        yield from without_effect(data, ("train_on_prompt", "mask_history"), reason)
        if data.streaming and self.compares:
            message = (
                "stage dpo computes reference log-probabilities of all pairs before the first "
                "step; switch streaming off, or use loss_type: cpo, orpo or simpo, which need none"
            )
            yield Problem(("data", "streaming"), message)

    def _reference(self, batch: Batch) -> torch.Tensor | None:
        if not self.compares:
            return None
        logps_P2, extras = batch.extras["reference"].view(-1, 2), batch.extras
        return self._without_tails(logps_P2, lambda: extras["reference_tail"].view(-1, 2))

    def _without_tails(
        self, sums_P2: torch.Tensor, tails: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """[P, 2] log-probabilities in which those of tails have the weight ``ld_alpha``."""
        return sums_P2 if self.ld_alpha == 1 else sums_P2 - (1 - self.ld_alpha) * tails()

    def _pairs(self, relative_P2: torch.Tensor, nll_P: torch.Tensor) -> Pairs:
        chosen_P, rejected_P = relative_P2.unbind(1)
        return Pairs(chosen_P, rejected_P, nll_P, self.beta, self.gamma, self.label_smoothing)


def _metrics(rewards_P2: torch.Tensor, logps_P2: torch.Tensor) -> dict[str, torch.Tensor]:
    """[P] each, under TRL's names."""
    (better_P, worse_P), (chosen_P, rejected_P) = rewards_P2.unbind(1), logps_P2.unbind(1)
    return {
        "rewards/chosen": better_P,
        "rewards/rejected": worse_P,
        "rewards/accuracies": (better_P > worse_P).to(better_P.dtype),
        "rewards/margins": better_P - worse_P,
        "logps/chosen": chosen_P,
        "logps/rejected": rejected_P,
    }
