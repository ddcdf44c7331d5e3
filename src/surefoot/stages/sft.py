"""Supervised fine-tuning: raise the probability of the response given the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..batch import Batch, Loss, Outputs, OutputSpec
from ..data.encoded import Encoded
from ..data.example import Example
from ..data.text.collation import collate as packed_or_padded
from ..data.text.ranking import not_to_imitate
from ..generate.servers.server import Engine, Sampler
from ..training.objectives.losses import check_smoothing, negative_log_likelihood, with_perplexity
from ..training.stage import AuxiliaryModel, as_loaded, no_columns, no_problems, no_remarks

if TYPE_CHECKING:
    from ..data.text.codec import Codec


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Train on the responses of conversations; prompts are masked (see
    ``data.train_on_prompt``)."""

    uses_template: ClassVar[bool] = True
    encoding: ClassVar[str] = "2"  # drops undesirable rows
    heads: ClassVar[Sequence[str]] = ()
    kept_by: ClassVar[Literal["item", "window"]] = "item"
    min_window: ClassVar[int] = 1
    auxiliary: ClassVar[Mapping[str, AuxiliaryModel]] = {}
    passes: ClassVar[int] = 1
    mini_batches: ClassVar[int] = 1
    group_size: ClassVar[int] = 1
    max_new_tokens: ClassVar[int] = 0
    sampler: ClassVar[Sampler] = Engine()
    collate = staticmethod(packed_or_padded)
    precompute = no_columns
    prepare = as_loaded
    metrics = with_perplexity
    remarks = no_remarks
    problems = no_problems

    label_smoothing_factor: float = 0.0
    """Label smoothing: the target probability of each token is ``1 - factor``, and the rest is
    spread evenly over the vocabulary (arXiv:1512.00567); 0.1 is usual.
    """

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing_factor)

    @property
    def spec(self) -> OutputSpec:
        """The sum of the labels' log-probabilities."""
        return OutputSpec(("total",), smoothing=self.label_smoothing_factor)

    @property
    def eval_spec(self) -> OutputSpec:
        """The model's own predictions, too."""
        return OutputSpec(("total", "predictions"), smoothing=self.label_smoothing_factor)

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render conversations with the chat template; the responses are trained."""
        reasons = [not_to_imitate(example) for example in examples]
        plain = [example for example, why in zip(examples, reasons, strict=True) if not why]
        found = iter(codec.encode_chats(plain))
        return [why or next(found) for why in reasons]

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """Cross entropy of the responses' tokens."""
        return negative_log_likelihood(outputs, batch)
