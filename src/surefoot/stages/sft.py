"""Supervised fine-tuning: raise the probability of the answer given the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..batch import Batch, Features, Loss, Outputs
from ..data.encoded import Encoded
from ..data.example import Example
from ..data.text.collation import collate
from ..data.text.ranking import RANKED, is_ranked
from ..training.objectives.losses import check_smoothing, negative_log_likelihood

if TYPE_CHECKING:
    from ..data.text.codec import Codec


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Learn the answers of conversations; prompts are read, not learnt (see
    ``data.train_on_prompt``)."""

    roles: ClassVar[tuple[str, ...]] = ("policy",)
    needs: ClassVar[tuple[str, ...]] = ("total",)
    uses_template: ClassVar[bool] = True

    label_smoothing_factor: float = 0.0
    """Learn that each token has probability ``1 - factor``, and that the rest is spread evenly over
    the vocabulary (arXiv:1512.00567); 0.1 is usual."""

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing_factor)

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render conversations with the chat template; labels on the answers."""
        plain = [example for example in examples if not is_ranked(example)]
        found = iter(codec.encode_chats(plain))
        return [RANKED if is_ranked(example) else next(found) for example in examples]

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Lay examples end to end, or in a padded rectangle."""
        return collate(features, packing=packing)

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """Cross entropy of the answers' tokens."""
        return negative_log_likelihood(outputs, batch)
