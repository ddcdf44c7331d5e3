"""The outputs of a model that stages need, computed in one place, so that no stage sees a batch of
logits.

The head computes trained positions only (``logits_to_keep``) and, where possible, log-probabilities
instead of logits: logits are most of the memory and, with a large vocabulary, much of the time.

Shapes: B rows, T tokens, N trained positions in reading order, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ...batch import Batch, Outputs, OutputSpec, TrainedPositions, ends, trained_positions
from ...errors import ModelError
from ..attention.packed import packed_arguments
from ..pretrained.router_loss import COEFFICIENTS
from .chunked_cross_entropy import top_entropies
from .divergence import TargetDistribution
from .logprob_head import LogprobHead


class Vocabulary(Protocol):
    """Operations on logits [N, v], of which this rank may have only some columns."""

    def logps(self, logits_Nv: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of each label."""

    def means(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of a token, averaged over the full vocabulary."""

    def entropies(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] entropy of each next-token distribution in nats: ``-sum p log p``."""

    def predictions(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] the most probable token."""


@dataclass(frozen=True)
class WholeVocabulary:
    """The full vocabulary is on this rank."""

    def logps(self, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of each label."""
        return -F.cross_entropy(logits_NV, labels_N, reduction="none")

    def means(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of a token, averaged over the vocabulary."""
        return F.log_softmax(logits_NV, dim=-1).mean(-1)

    def entropies(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] entropy of each next-token distribution in nats: ``-sum p log p``."""
        logps_NV = F.log_softmax(logits_NV, dim=-1)
        return -(logps_NV.exp() * logps_NV).sum(-1)

    def predictions(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] the most probable token."""
        return logits_NV.argmax(-1)


def compute(
    model: nn.Module,
    batch: Batch,
    spec: OutputSpec,
    *,
    hidden: torch.Tensor | None = None,
    vocabulary: Vocabulary | None = None,
    head: LogprobHead | None = None,
    values: nn.Linear | None = None,
    target: TargetDistribution | None = None,
) -> Outputs:
    """Run ``model`` on ``batch`` and return the outputs of ``spec``.

    Args:
        model: the full model, or the last stage of a pipeline.
        batch: on its device.
        spec: which outputs, and where.
        hidden: the input in place of embedded tokens, if it is the last stage of a pipeline.
        vocabulary: of a head that leaves only a shard of the logits on this rank.
        head: the model's, if it is complete and can return more than logits.
        values: the head that computes ``Outputs.values``.
        target: the distributions that ``Outputs.divergences`` are from.

    Raises ``ModelError`` if the model has no head for the values of ``spec``.
    """
    at = batch.at_ends or ends(batch) if spec.at == "ends" else batch.at or trained_positions(batch)
    router: list[torch.Tensor | None] = []

    def run() -> torch.Tensor:
        found = model(logits_to_keep=at.kept, **_arguments(model, batch, hidden))
        router.append(_router_loss(model, found))
        logits: torch.Tensor = found.logits
        return logits

    if "values" in spec.outputs and (head is None or values is None):
        raise ModelError(
            f"{type(model).__name__} has no value head, or none whose values it would return "
            "unchanged; open it with heads, or take another architecture"
        )
    if head is None and spec.divergence is not None:
        raise no_distribution(model)
    if head is None:
        logits_Nv = trained(run(), at)
        answers = _of_logits(logits_Nv, at.labels, spec, vocabulary or WholeVocabulary())
    else:
        answers = head.run(run, lambda x: trained(x, at), at.labels, spec, values, target)
    return replace(answers, router_loss=router[0])


def compute_target(model: nn.Module, batch: Batch, head: LogprobHead | None) -> TargetDistribution:
    """The distributions of ``model`` at the trained positions of ``batch``. Raises ``ModelError``
    if it does not return its head's logits unchanged."""
    if head is None:
        raise no_distribution(model)
    at = batch.at or trained_positions(batch)

    def run() -> torch.Tensor:
        logits: torch.Tensor = model(
            logits_to_keep=at.kept, **_arguments(model, batch, None)
        ).logits
        return logits

    return head.target(run, lambda x: trained(x, at))


def no_distribution(model: nn.Module) -> ModelError:
    """The error for a model whose distributions cannot be computed in chunks."""
    return ModelError(
        f"{type(_inner(model)).__name__}: its distribution over the vocabulary cannot be compared "
        "with another model's, as it changes its logits after the output head, or the method "
        "adapts or copies that head; take another model, or leave lm_head out of the method"
    )


def _router_loss(model: nn.Module, found: Any) -> torch.Tensor | None:
    """The loss of a mixture's routers as the model itself would add it to that of labels: only
    where ``output_router_logits`` is set in its configuration."""
    loss: torch.Tensor | None = getattr(found, "aux_loss", None)
    if loss is None:
        return None
    inner = _inner(model)
    places = (inner, inner.config.get_text_config())
    known = (getattr(place, name, None) for place in places for name in COEFFICIENTS)
    coefficient = next((value for value in known if value is not None), None)
    if coefficient is None:
        raise ModelError(
            f"{type(inner).__name__} computes a loss of its routers, but its configuration has no "
            "coefficient for it; set output_router_logits to false in config.json"
        )
    balance: torch.Tensor = coefficient * loss
    return balance


def trained(x_BKX: torch.Tensor, at: TrainedPositions) -> torch.Tensor:
    """[N, X]: the trained positions of the kept columns."""
    return x_BKX[0] if at.among_kept is None else x_BKX[at.rows, at.among_kept]


def _of_logits(
    logits_Nv: torch.Tensor, labels_N: torch.Tensor, spec: OutputSpec, vocabulary: Vocabulary
) -> Outputs:
    if logits_Nv.dtype in (torch.float16, torch.bfloat16):
        logits_Nv = logits_Nv.float()
    if spec.temperature != 1.0:
        logits_Nv = logits_Nv / spec.temperature
    needs, smoothing = spec.outputs, spec.smoothing
    logps_N = vocabulary.logps(logits_Nv, labels_N)
    total, smoothed = logps_N.sum(), None
    if smoothing:
        smoothed = (1.0 - smoothing) * total + smoothing * vocabulary.means(logits_Nv).sum()
    return Outputs(
        logps=logps_N,
        total=total,
        smoothed=smoothed,
        entropies=vocabulary.entropies(logits_Nv) if "entropies" in needs else None,
        top_entropies=top_entropies(logits_Nv) if "top_entropies" in needs else None,
        predictions=vocabulary.predictions(logits_Nv) if "predictions" in needs else None,
    )


def hidden_states(model: nn.Module, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
    """The output of a pipeline stage that is not the last, [B, T, hidden size]."""
    found: torch.Tensor = model(**_arguments(model, batch, hidden)).last_hidden_state
    return found


def _arguments(model: nn.Module, batch: Batch, hidden: torch.Tensor | None) -> dict[str, object]:
    entering = {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    packed = batch.cu_seqlens
    return {
        **entering,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        "use_cache": False,
        **({} if packed is None else packed_arguments(_inner(model), packed, batch.branches)),
    }


def _inner(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    inner = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]
    return cast(PreTrainedModel, inner)
