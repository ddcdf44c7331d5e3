"""Pretraining: raise the probability of every token of plain text given those before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..batch import Batch, Loss, Outputs, OutputSpec
from ..data.example import Dropped, Encoded, Example
from ..data.section import DataSection
from ..data.text.ranking import not_to_imitate
from ..parallel.section import ParallelSection
from ..schema import Problem, must
from ..training.losses import LIKELIHOOD, negative_log_likelihood, with_perplexity
from ..training.stage import Stage
from ._rules import without_effect

if TYPE_CHECKING:
    from ..data.text.codec import Codec

CALLS = Dropped("calls functions, which only a chat template can render (stage: sft)")


@dataclass(frozen=True, kw_only=True)
class PT(Stage):
    """Train on whole texts, split into pieces of at most ``data.cutoff_len`` tokens; no chat
    template."""

    better_if_greater: ClassVar[Mapping[str, bool]] = LIKELIHOOD
    uses_template: ClassVar[bool] = False
    reads_pairs = False
    metrics = with_perplexity

    label_smoothing_factor: float = 0.0
    """Label smoothing: the target probability of each token is ``1 - factor``, and the rest is
    spread evenly over the vocabulary (arXiv:1512.00567); 0.1 is usual.
    """

    def __post_init__(self) -> None:
        must(self, "be in [0, 1)", "label_smoothing_factor")

    @property
    def spec(self) -> OutputSpec:
        """The sum of the labels' log-probabilities."""
        return OutputSpec(("total",), smoothing=self.label_smoothing_factor)

    @property
    def eval_spec(self) -> OutputSpec:
        """The model's own predictions, too."""
        return OutputSpec(("total", "predictions"), smoothing=self.label_smoothing_factor)

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Split each text into consecutive pieces; no token is lost."""
        known = [_why_not(each) or codec.encode_ids(each, in_pieces=True) for each in examples]
        plain = [_text(each) for each, outcome in zip(examples, known, strict=True) if not outcome]
        encoded = iter(codec.encode_documents(plain))
        return [outcome or next(encoded) for outcome in known]

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """Cross entropy of every token but the first of a piece."""
        return negative_log_likelihood(outputs, batch)

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Plain text is trained on completely; settings of turns would have no effect."""
        names = ("train_on_prompt", "mask_history", "default_system")
        return without_effect(data, names, "stage pt, which trains on whole texts")


def _why_not(example: Example) -> Dropped | None:
    """Why an example is no text to imitate; None if it is."""
    if any(message.tool_calls for message in example.messages):
        return CALLS
    return not_to_imitate(example)


def _text(example: Example) -> str:
    """The row's text; for a conversation, its turns concatenated."""
    if example.text is not None:
        return example.text
    return "\n".join(message.content for message in example.messages if message.content)
