"""The pipeline stages of one rank, and their input, which no other rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...batch import Batch
from ...model.pipeline_stages import Stages, keep, split
from ...network.method import UnshardedWeights
from ...network.pipelined import plan_pipeline_stages


@dataclass(frozen=True)
class StageShare:
    """The stages of one rank, the first being ``place`` of ``size`` ranks."""

    place: int
    size: int
    stages: Stages
    learns: Sequence[bool]  # of all stages, whether anything learns in one or before it
    hidden_size: int
    dtype: torch.dtype  # of what passes between stages

    @property
    def numbers(self) -> list[int]:
        """Which of all stages these are."""
        return sorted(self.stages.here)

    @property
    def layers(self) -> list[range]:
        """The layers of each of these stages."""
        runs = split(self.stages.parts.num_layers, len(self.learns))
        return [runs[number] for number in self.numbers]

    def entering(self, batch: Batch, number: int) -> torch.Tensor | None:
        """The input of the stage ``number``, [B, T, hidden size]; the first one gets tokens."""
        if number == 0:
            return None
        hidden = torch.empty(*batch.input_ids.shape, self.hidden_size, dtype=self.dtype)
        return hidden.requires_grad_(self.learns[number - 1])

    def size_of(self, batch: Batch) -> int:
        """Bytes that pass between two stages for ``batch``."""
        return batch.input_ids.numel() * self.hidden_size * self.dtype.itemsize


def share(
    inner: PreTrainedModel,
    weights: UnshardedWeights,
    place: int,
    *,
    size: int,
    num_parts: int,
    dtype: torch.dtype | None,
) -> StageShare:
    """Keep only the stages of the rank ``place`` of ``size`` in ``inner``. ``dtype`` is that of
    gathered weights, if they are gathered. Raises ``RecipeError`` if the model cannot be split."""
    num_stages = size * num_parts
    division = plan_pipeline_stages(inner, weights, num_stages)
    embedding = inner.get_input_embeddings().weight
    stages = keep(inner, range(place, num_stages, size), num_stages)
    hidden_size = inner.config.get_text_config().hidden_size
    return StageShare(place, size, stages, division.learns, hidden_size, dtype or embedding.dtype)
