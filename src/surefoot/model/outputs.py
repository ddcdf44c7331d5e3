"""What stages need of a model, computed in one place, so that no stage ever sees a batch of logits.

Logits exist only at trained positions: the head is asked for those alone (``logits_to_keep``),
which is most of the memory and, with a large vocabulary, much of the time. Chunked and fused heads
belong here.

Shapes: B rows, T tokens, N trained positions in reading order, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ..batch import IGNORE_INDEX, Batch, Outputs
from .attention import packed_arguments


@dataclass(frozen=True)
class Places:
    """Where the trained labels of a batch are predicted: at N positions in K columns."""

    rows: torch.Tensor  # [N]
    columns: torch.Tensor  # [N] of the batch
    kept: torch.Tensor  # [K] the columns that the head is asked for
    among_kept: torch.Tensor | None  # [N] each position's column among these; None: one row, N = K


class Vocabulary(Protocol):
    """How logits [N, v] lie, of which this process may have some columns only."""

    def logps(self, logits_Nv: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of each label."""

    def entropies(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] entropy of each next-token distribution in nats: ``-sum p log p``."""

    def predictions(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] the most probable token."""


@dataclass(frozen=True)
class WholeVocabulary:
    """All of it is here."""

    def logps(self, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of each label."""
        return -F.cross_entropy(logits_NV, labels_N, reduction="none")

    def entropies(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] entropy of each next-token distribution in nats: ``-sum p log p``."""
        logps_NV = F.log_softmax(logits_NV, dim=-1)
        return -(logps_NV.exp() * logps_NV).sum(-1)

    def predictions(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] the most probable token."""
        return logits_NV.argmax(-1)


def places(batch: Batch) -> Places:
    """The places of ``batch``. ``labels[b, t]`` is predicted at position t - 1.

    A packed row keeps just its trained positions; a rectangle, the columns where any row is
    trained.
    """
    rows, columns = (batch.labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    if len(batch.labels) == 1:
        return Places(rows, columns, columns, None)
    return Places(rows, columns, *torch.unique(columns, return_inverse=True))


def compute(
    model: torch.nn.Module,
    batch: Batch,
    needs: Collection[str],
    at: Places | None = None,
    *,
    hidden: torch.Tensor | None = None,
    vocabulary: Vocabulary | None = None,
) -> Outputs:
    """Run ``model`` on ``batch`` and keep what a stage ``needs`` (names of ``Outputs``' fields).

    Args:
        model: all of it, or the end of a pipeline.
        batch: on its device.
        needs: names of ``Outputs``' fields.
        at: the places of ``batch``, where they are known already.
        hidden: what enters the model in place of embedded tokens, if it is the end of a pipeline.
        vocabulary: of a head that leaves a part of the logits here.
    """
    vocabulary = vocabulary or WholeVocabulary()
    logits_NV, labels_N = trained_logits(model, batch, at, hidden)
    if logits_NV.dtype in (torch.float16, torch.bfloat16):
        logits_NV = logits_NV.float()
    return Outputs(
        logps=vocabulary.logps(logits_NV, labels_N),
        entropies=vocabulary.entropies(logits_NV) if "entropies" in needs else None,
        predictions=vocabulary.predictions(logits_NV) if "predictions" in needs else None,
    )


def trained_logits(
    model: torch.nn.Module,
    batch: Batch,
    at: Places | None = None,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [N, V] that predict the trained labels, and those labels [N]."""
    at = at or places(batch)
    labels_N = batch.labels[at.rows, at.columns + 1]
    logits = model(logits_to_keep=at.kept, **_arguments(model, batch, hidden)).logits
    return (logits[0] if at.among_kept is None else logits[at.rows, at.among_kept]), labels_N


def hidden_states(
    model: torch.nn.Module, batch: Batch, hidden: torch.Tensor | None
) -> torch.Tensor:
    """What leaves a stage of a pipeline that is not the last, [B, T, hidden size]."""
    found: torch.Tensor = model(**_arguments(model, batch, hidden)).last_hidden_state
    return found


def _arguments(
    model: torch.nn.Module, batch: Batch, hidden: torch.Tensor | None
) -> dict[str, object]:
    entering = {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    packed = batch.cu_seqlens
    return {
        **entering,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        "use_cache": False,
        **({} if packed is None else packed_arguments(_inner(model), packed)),
    }


def _inner(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    inner = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]
    return cast(PreTrainedModel, inner)
