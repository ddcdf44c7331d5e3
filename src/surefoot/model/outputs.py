"""What stages need of a model, computed in one place, so that no stage ever sees a batch of logits.

The head is asked for trained positions alone (``logits_to_keep``), and where it can be, for
log-probabilities rather than logits: these are most of the memory and, with a large vocabulary,
much of the time.

Shapes: B rows, T tokens, N trained positions in reading order, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..batch import IGNORE_INDEX, Batch, Outputs
from .asked_head import AskedHead
from .attention import packed_arguments


@dataclass(frozen=True)
class Places:
    """Where the trained labels of a batch are predicted: at N positions in K columns."""

    rows: torch.Tensor  # [N]
    columns: torch.Tensor  # [N] of the batch
    kept: torch.Tensor  # [K] the columns that the head is asked for
    among_kept: torch.Tensor | None  # [N] each position's column among these; None: one row, N = K


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
    model: nn.Module,
    batch: Batch,
    needs: Collection[str],
    at: Places | None = None,
    *,
    head: AskedHead | None = None,
) -> Outputs:
    """Run ``model`` on ``batch`` and keep what a stage ``needs`` (names of ``Outputs``' fields).

    ``at`` are the places of ``batch``, where they are known already. ``head`` is the model's, if it
    is one that can be asked for more than logits.
    """
    at = at or places(batch)
    labels_N = batch.labels[at.rows, at.columns + 1]
    if head is None:
        return _from_logits(trained(_run(model, batch, at), at), labels_N, needs)
    return head.run(lambda: _run(model, batch, at), lambda x: trained(x, at), labels_N, needs)


def _run(model: nn.Module, batch: Batch, at: Places) -> torch.Tensor:
    """What the head gives for the kept columns, [B, K, ...]."""
    found: torch.Tensor = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=at.kept,
        use_cache=False,
        **({} if batch.cu_seqlens is None else packed_arguments(_inner(model), batch.cu_seqlens)),
    ).logits
    return found


def trained(x_BKX: torch.Tensor, at: Places) -> torch.Tensor:
    """[N, X]: of the kept columns, the trained positions."""
    return x_BKX[0] if at.among_kept is None else x_BKX[at.rows, at.among_kept]


def _from_logits(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, needs: Collection[str]
) -> Outputs:
    if logits_NV.dtype in (torch.float16, torch.bfloat16):
        logits_NV = logits_NV.float()
    logps_N = -F.cross_entropy(logits_NV, labels_N, reduction="none")
    return Outputs(
        logps=logps_N,
        total=logps_N.sum(),
        entropies=_entropies(logits_NV) if "entropies" in needs else None,
        predictions=logits_NV.argmax(-1) if "predictions" in needs else None,
    )


def _inner(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    inner = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]
    return cast(PreTrainedModel, inner)


def _entropies(logits_NV: torch.Tensor) -> torch.Tensor:
    """Entropy of each next-token distribution in nats: ``-sum p log p``."""
    logps_NV = F.log_softmax(logits_NV, dim=-1)
    return -(logps_NV.exp() * logps_NV).sum(-1)
