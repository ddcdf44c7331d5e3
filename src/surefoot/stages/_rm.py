"""Reward modeling: a head that scores the chosen response above the rejected one."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..batch import SCORES, Batch, Features, Loss, Outputs, OutputSpec
from ..data.example import Dropped, Encoded, Example, Truncated
from ..data.section import DataSection
from ..data.text.collation import collate_pairs, join, split, with_columns
from ..data.text.ranking import encode_pairs, up_to_last_label
from ..errors import DataError
from ..parallel.section import ParallelSection
from ..schema import Problem, must
from ..training import losses
from ..training.stage import Stage
from ._rules import must_not_shard, without_effect

if TYPE_CHECKING:
    import torch

    from ..data.text.codec import Codec

_LARGEST = 3.4e38  # in float32
NO_END = Dropped(
    "the end of a response is beyond data.cutoff_len, and its reward is read at its end token"
)


@dataclass(frozen=True, kw_only=True)
class RM(Stage):
    """Train a reward model on preference pairs: ``-log sigmoid(r_chosen - r_rejected)`` (Bradley
    and Terry; arXiv:2203.02155).

    A reward is one number, a linear head's, at the end token of the response. The head starts at 0,
    or as in ``model.path`` if that is a reward model. The loss is a sum over pairs.
    """

    better_if_greater: ClassVar[Mapping[str, bool]] = losses.PAIRS
    reads_pictures = True
    row_columns = frozenset({"margin"})
    encoding: ClassVar[str] = "1"
    heads: ClassVar[Mapping[str, int]] = {"values": 1}
    spec: ClassVar[OutputSpec] = SCORES
    row_metric: ClassVar[tuple[str, bool]] = ("margin", True)

    center_rewards_coefficient: float = 0.0
    """Weight of ``(r_chosen + r_rejected)^2``, which keeps the rewards near 0 (arXiv:2312.09244).
    Usual is 0.01.
    """
    use_margins: bool = False
    """Whether the rewards of a pair should differ by its column ``margin`` at least
    (arXiv:2307.09288).
    """

    def __post_init__(self) -> None:
        must(self, "not be negative", "center_rewards_coefficient")

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Render both conversations of each row with the template, up to the responses' end."""
        pairs = zip(examples, encode_pairs(examples, codec), strict=True)
        return [_scored(outcome, example) for example, outcome in pairs]

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Pack pairs, each prompt once, or pad them to a rectangle. Raises ``DataError``: margins
        are to be used, and a pair has none."""
        batch = collate_pairs(features, packing=packing)
        if not self.use_margins:
            return batch
        margins = [_margin(item) for item in features]
        if any(math.isnan(margin) for margin in margins):
            raise DataError(
                "stage.rm.use_margins: a pair has no number in its column 'margin'; give one to "
                "every row, or leave use_margins off"
            )
        return with_columns(batch, [{"margin": [m]} for m in margins], ["margin"])  # type: ignore[list-item]

    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """The loss of each pair, summed; a pair without labels has no weight."""
        assert outputs.values is not None
        rewards_P2 = outputs.values.view(-1, 2)
        is_there_P = (batch.extras["answer_lengths"].view(-1, 2) > 0).all(1)
        chosen_P, rejected_P = rewards_P2.unbind(1)
        margins_P = chosen_P - rejected_P
        wanted_P = batch.extras["margin"].to(margins_P) if self.use_margins else 0.0
        losses_P = losses.sigmoid(margins_P - wanted_P, beta=1.0, label_smoothing=0.0)
        if self.center_rewards_coefficient:
            losses_P = losses_P + self.center_rewards_coefficient * (chosen_P + rejected_P) ** 2
        figures = {
            "rewards/chosen": chosen_P,
            "rewards/rejected": rejected_P,
            "rewards/accuracies": (margins_P > 0).to(margins_P),
            "rewards/margins": margins_P,
        }

        def summed(values_P: torch.Tensor) -> torch.Tensor:
            return values_P.where(is_there_P, values_P.new_zeros(())).sum()

        metrics = {name: summed(values.detach()) for name, values in figures.items()}
        return Loss(summed(losses_P), is_there_P.sum(), metrics, margins_P.detach().float())

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Only whole responses are scored; heads are not sharded along ``tp`` or ``pp``."""
        reason = "stage rm, which scores last responses"
        yield from without_effect(data, ("train_on_prompt", "mask_history"), reason)
        message = "stage rm has a head that cannot be sharded along {axis}; set it to 1"
        yield from must_not_shard(parallel, ("tp", "pp"), message)


def _scored(outcome: Encoded, example: Example) -> Encoded:
    """A pair whose responses end in their last trained token, the end token if the template writes
    one, with its margin as the bits of a float32: the cache stores integers."""
    if isinstance(outcome, Dropped):
        return outcome
    if isinstance(outcome, Truncated):
        return NO_END
    pair = join(*map(up_to_last_label, split(outcome[0])))
    (bits,) = struct.unpack("<i", struct.pack("<f", _column(example)))
    return [{**pair, "margin": [bits]}]


def _margin(item: Features) -> float:
    (margin,) = struct.unpack("<f", struct.pack("<i", int(item["margin"][0])))
    return float(margin)


def _column(example: Example) -> float:
    """The number in the column ``margin``; NaN if there is none, or it is beyond float32."""
    value = example.columns.get("margin")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if abs(number) < _LARGEST else math.nan
