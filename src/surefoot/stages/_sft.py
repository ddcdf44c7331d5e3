"""Supervised fine-tuning: raise the probability of the response given the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..batch import Batch, Divergence, Loss, Outputs, OutputSpec
from ..data.example import Encoded, Example
from ..data.section import DataSection
from ..data.text.ranking import not_to_imitate
from ..parallel.section import ParallelSection
from ..schema import Needs, Problem, must
from ..training.losses import (
    LIKELIHOOD,
    negative_log_likelihood,
    weighted_likelihood,
    with_perplexity,
)
from ..training.stage import AuxiliaryModel, Stage
from ._rules import REFERENCE, must_not_shard

if TYPE_CHECKING:
    from ..data.text.codec import Codec


@dataclass(frozen=True, kw_only=True)
class SFT(Stage):
    """Train on the responses of conversations; prompts are masked (see
    ``data.train_on_prompt``)."""

    better_if_greater: ClassVar[Mapping[str, bool]] = LIKELIHOOD
    encoding: ClassVar[str] = "2"  # drops undesirable rows
    reads_pictures = True
    reads_pairs = False
    metrics = with_perplexity

    loss_type: Literal["cross_entropy", "dft", "eaft", "asft"] = "cross_entropy"
    """``cross_entropy`` counts all tokens alike. ``dft`` (arXiv:2508.05629) weighs each by the
    probability that the model gives it. ``eaft`` (arXiv:2601.02151) weighs it by the entropy of the
    model's next token, so that what it is sure of moves it less. ``asft`` (arXiv:2509.23753) is
    ``dft`` with a divergence that holds the model near the one before the first step.
    """
    eaft_alpha: Annotated[float, Needs("loss_type", ("eaft",))] = 1.0
    """``eaft`` only: the exponent of the weights; 0 is ``cross_entropy``."""
    asft_alpha: Annotated[float, Needs("loss_type", ("asft",))] = 0.1
    """``asft`` only: the weight of the divergence, KL(model before the first step || model)."""
    label_smoothing_factor: float = 0.0
    """Label smoothing: the target probability of each token is ``1 - factor``, and the rest is
    spread evenly over the vocabulary (arXiv:1512.00567); 0.1 is usual.
    """

    def __post_init__(self) -> None:
        must(self, "be in [0, 1)", "label_smoothing_factor")
        if self.label_smoothing_factor and self.loss_type != "cross_entropy":
            raise ValueError(
                f"label_smoothing_factor has no effect on loss_type {self.loss_type}; leave it out"
            )
        must(self, "not be negative", "eaft_alpha", "asft_alpha")

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """Of asft, the model before the first step."""
        if self.loss_type != "asft":
            return {}
        return {REFERENCE: AuxiliaryModel(OutputSpec(("logps",)), None, when="window")}

    @property
    def spec(self) -> OutputSpec:
        """The sum of the labels' log-probabilities, or each of them with what weighs it."""
        if self.loss_type == "cross_entropy":
            return OutputSpec(("total",), smoothing=self.label_smoothing_factor)
        if self.loss_type == "asft":
            return OutputSpec(("divergences", "logps"), divergence=Divergence(REFERENCE))
        more = ("top_entropies",) if self.loss_type == "eaft" else ()
        return OutputSpec(("logps", *more))

    @property
    def eval_spec(self) -> OutputSpec:
        """The model's own predictions, too."""
        if self.loss_type == "asft":
            return self.spec
        return replace(self.spec, outputs=(*self.spec.outputs, "predictions"))

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render conversations with the chat template; the responses are trained."""
        known = [not_to_imitate(example) or codec.encode_ids(example) for example in examples]
        plain = [example for example, outcome in zip(examples, known, strict=True) if not outcome]
        encoded = iter(codec.encode_chats(plain))
        return [outcome or next(encoded) for outcome in known]

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """Cross entropy of the responses' tokens, or another loss that ``loss_type`` names."""
        if self.loss_type == "cross_entropy":
            return negative_log_likelihood(outputs, batch)
        return weighted_likelihood(
            *(outputs, batch),
            kind=self.loss_type,
            eaft_alpha=self.eaft_alpha,
            asft_alpha=self.asft_alpha,
        )

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Some losses need all logits of a token on one rank."""
        axes = {"asft": ("tp", "pp"), "eaft": ("tp",)}.get(self.loss_type, ())
        message = (
            f"stage sft with loss_type {self.loss_type} needs all logits of a token on one rank, "
            "which {axis} shards; set it to 1, and use parallel.dp_shard"
        )
        return must_not_shard(parallel, axes, message)
