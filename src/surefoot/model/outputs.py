"""The outputs of a model that stages need, computed in one place, so that no stage sees a batch of
logits.

The head computes trained positions only (``logits_to_keep``) and, where possible, log-probabilities
instead of logits: logits are most of the memory and, with a large vocabulary, much of the time.

Shapes: B rows, T tokens, N trained positions in reading order, V vocabulary.

Replace lm_head's forward pass by one that returns label log-probabilities and never builds the
full logits.

The replacement is active while the model runs. So the weights stay where the model expects them
(gathered, if they are sharded), and no forward pass of a model is rewritten. Operations that the
model applies to logits afterwards would be applied to these outputs. So only models are supported
that apply none, or a cap that is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ..batch import (
    Batch,
    Outputs,
    OutputSpec,
    RouterSums,
    TrainedPositions,
    ends,
    trained_positions,
)
from ..errors import ModelError, first_line
from ..log import fell_back
from .chunked_cross_entropy import (
    Head,
    Scores,
    TargetDistribution,
    divergences,
    logps,
    scores,
    top_entropies,
    totals,
    wide,
)
from .loading import on_meta, once_per_architecture
from .lora_layers import unadapted
from .packed_attention import one_document, packed_arguments
from .routers import sums_of

_SOFTCAP = "final_logit_softcapping"


@dataclass(frozen=True)
class LogprobHead:
    """A head that returns log-probabilities; the model itself must not cap its logits meanwhile."""

    linear: nn.Linear
    config: PretrainedConfig
    softcap: float | None

    def run(
        self,
        model: Callable[[], torch.Tensor],
        trained: Callable[[torch.Tensor], torch.Tensor],
        labels_N: torch.Tensor,
        spec: OutputSpec,
        values: nn.Linear | None = None,
        target: TargetDistribution | None = None,
    ) -> Outputs:
        """Run ``model``, which returns what its head returns; the outputs of ``spec`` at the
        ``trained`` positions, whose labels these are. ``values`` is the head of ``Outputs.values``,
        which leave the model beside the log-probabilities. ``target`` is what ``divergences`` are
        from."""
        if spec.divergence is not None:
            assert target is not None
            return self._diverging(model, trained, labels_N, spec, target)
        needs, smoothing = set(spec.outputs), spec.smoothing
        is_valued, needs = "values" in needs, needs - {"values"}
        beside: list[Scores | torch.Tensor] = []

        def answer(hidden_BKD: torch.Tensor) -> torch.Tensor:
            hidden_ND = trained(hidden_BKD)
            if not is_valued:
                return self._answer(hidden_ND, labels_N, spec, beside)
            assert values is not None
            values_NK: torch.Tensor = values(hidden_ND.to(values.weight.dtype))
            # not a view: FSDP2 warns of what in-place operations on one would do
            values_N = (values_NK[:, 0] if values_NK.shape[1] == 1 else values_NK).clone()
            values_N = values_N.to(wide(values_N.dtype))
            if not needs:
                return values_N
            each = replace(spec, outputs=(*needs, "logps"))  # one number for each position
            rows_XN = self._answer(hidden_ND, labels_N, each, beside)
            rows_XN = rows_XN if rows_XN.ndim == 2 else rows_XN[None]
            return torch.cat([rows_XN, values_N[None]])

        with _answering(self, answer):
            head_outputs = model()
        if is_valued:
            values_N = head_outputs if not needs else head_outputs[-1]
            if not needs:
                return Outputs(values=values_N)
            head_outputs = head_outputs[0] if len(head_outputs) == 2 else head_outputs[:-1]
            needs |= {"logps"}
            return replace(_outputs(head_outputs, beside, needs, smoothing), values=values_N)
        return _outputs(head_outputs, beside, needs, smoothing)

    def target(
        self,
        model: Callable[[], torch.Tensor],
        trained: Callable[[torch.Tensor], torch.Tensor],
    ) -> TargetDistribution:
        """Run ``model`` without its head, for others to be compared with its distributions at the
        ``trained`` positions."""
        targets: list[TargetDistribution] = []

        def answer(hidden_BKD: torch.Tensor) -> torch.Tensor:
            hidden_ND = trained(hidden_BKD)
            targets.append(
                TargetDistribution(*self._head(hidden_ND, 1.0))
            )  # gathered now, if it is sharded
            return hidden_ND

        with _answering(self, answer):
            model()
        return targets[0]

    def _diverging(
        self,
        model: Callable[[], torch.Tensor],
        trained: Callable[[torch.Tensor], torch.Tensor],
        labels_N: torch.Tensor,
        spec: OutputSpec,
        target: TargetDistribution,
    ) -> Outputs:
        """Divergences, and log-probabilities of labels if ``spec`` names them."""
        divergence = spec.divergence
        assert divergence is not None
        is_alone = set(spec.outputs) == {"divergences"}

        def answer(hidden_BKD: torch.Tensor) -> torch.Tensor:
            hidden_ND, head = self._head(trained(hidden_BKD), spec.temperature)
            divergences_N, logps_N = divergences(head, hidden_ND, labels_N, target, divergence)
            return torch.stack([divergences_N] if is_alone else [divergences_N, logps_N])

        with _answering(self, answer):
            head_outputs = model()
        return Outputs(divergences=head_outputs[0], logps=None if is_alone else head_outputs[1])

    def _answer(
        self,
        hidden_ND: torch.Tensor,
        labels_N: torch.Tensor,
        spec: OutputSpec,
        beside: list[Scores | torch.Tensor],
    ) -> torch.Tensor:
        """What the head returns: the sum of log-probabilities twice, each of them, or rows of
        log-probabilities, entropies and means. ``beside`` gets what has no gradient: each of a sum,
        or all scores."""
        needs = set(spec.outputs)
        hidden_ND, head = self._head(hidden_ND, spec.temperature)
        if needs <= {"total"}:
            *sums, logps_N = totals(head, hidden_ND, labels_N, spec.smoothing)
            beside.append(logps_N)
            return torch.stack(sums)
        if not spec.smoothing and needs <= {"total", "logps"}:
            return logps(head, hidden_ND, labels_N)
        all_scores = scores(head, hidden_ND, labels_N, top="top_entropies" in needs)
        beside.append(all_scores)
        return torch.stack([all_scores.logps, all_scores.entropies, all_scores.means])

    def _head(self, hidden_ND: torch.Tensor, temperature: float) -> tuple[torch.Tensor, Head]:
        """The hidden states and the head whose logits are those of the model, divided by
        ``temperature``: with a cap c, c tanh(x / c) / T is c' tanh(x' / c') for c' = c / T and
        x' = x / T."""
        kind = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        bias: torch.Tensor | None = self.linear.bias
        softcap = self.softcap
        if temperature != 1.0:
            hidden_ND = hidden_ND / temperature
            bias = None if bias is None else bias / temperature
            softcap = None if softcap is None else softcap / temperature
        return hidden_ND, Head(self.linear.weight, bias, softcap, dtype)


def _outputs(
    head_outputs: torch.Tensor,
    beside: Sequence[Scores | torch.Tensor],
    needs: Collection[str],
    smoothing: float,
) -> Outputs:
    """The outputs that a head has returned; see ``LogprobHead._answer``."""
    if not beside:
        return Outputs(logps=head_outputs, total=head_outputs.sum())
    (scores_or_logps,) = beside
    if isinstance(scores_or_logps, torch.Tensor):
        # of the two only the first has a gradient; without smoothing it is the same number
        smoothed_total, total = head_outputs
        if smoothing:
            return Outputs(total=total, smoothed=smoothed_total, plain_logps=scores_or_logps)
        return Outputs(total=smoothed_total, plain_logps=scores_or_logps)
    logps_N, entropies_N, means_N = head_outputs
    total, predictions_N = logps_N.sum(), scores_or_logps.predictions
    smoothed = (1.0 - smoothing) * total + smoothing * means_N.sum() if smoothing else None
    return Outputs(
        logps_N,
        total,
        smoothed,
        entropies_N,
        top_entropies=scores_or_logps.top_entropies if "top_entropies" in needs else None,
        predictions=predictions_N,
    )


@contextlib.contextmanager
def _answering(head: LogprobHead, answer: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    config, attributes = head.config, vars(head.linear)
    before = attributes.get("forward")
    attributes["forward"] = answer
    if head.softcap is not None:  # in its dict: some configurations check types, and None is none
        vars(config)[_SOFTCAP] = None
    try:
        yield
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before
        if head.softcap is not None:
            vars(config)[_SOFTCAP] = head.softcap


def logprob_head_of(model: PreTrainedModel) -> LogprobHead | None:
    """The head of ``model``, if it can be replaced: a plain matrix, whose result the model returns
    unchanged."""
    if (why := why_full_logits(model)) is not None:
        what = f"{type(model).__name__}: the output head computes full logits"
        fell_back(what, why, "takes more time and memory")
        return None
    head = _head(model, model.get_output_embeddings())
    if head.softcap is not None and _returns_mark(model, replace(head, softcap=None)) is None:
        # Gemma 3 with pictures has the cap of Gemma 2 in its configuration, and does not apply it
        return replace(head, softcap=None)
    return head


def why_full_logits(model: PreTrainedModel) -> str | None:
    """Why the head of ``model`` cannot be replaced; None if it can."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return "the head is more than a product with a matrix, as of an adapter on it"
    return _why_changed(model)


def _head(model: PreTrainedModel, linear: Any) -> LogprobHead:
    config = model.config.get_text_config()
    return LogprobHead(linear, config, getattr(config, _SOFTCAP, None))


@once_per_architecture
def _why_changed(model: PreTrainedModel) -> str | None:
    """Why ``model`` does not return what its head does, unchanged but for a cap that is known; None
    if it does."""
    return _returns_mark(model, _head(model, model.get_output_embeddings()))


@torch.no_grad()
def _returns_mark(model: PreTrainedModel, head: LogprobHead) -> str | None:
    """Why ``model`` does not return what ``head`` does, unchanged; None if it does. Runs the
    model's code on two tokens, on the meta device, so that the answer is the same whether they are
    there yet."""
    linear = model.get_output_embeddings()
    # what a quantized model multiplies by cannot be put aside; it always has its values
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    device = torch.device("meta") if is_plain else linear.weight.device
    mark = torch.zeros((), device=device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    blank = on_meta(model) if is_plain else contextlib.nullcontext()
    try:
        with _answering(head, lambda _: mark), blank, unadapted(model):
            arguments = {"input_ids": ids, "attention_mask": None, "use_cache": False}
            logits = model(**{**arguments, **one_document(model, 2)}).logits
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, ModelError) as error:
        why = f"its code fails on the meta device ({type(error).__name__}: {first_line(error)})"
        return f"whether the model changes logits after its output head is not known: {why}"
    return None if logits is mark else "the model changes the logits after its output head"


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
    router: list[RouterSums | None] = []

    def run() -> torch.Tensor:
        output = model(logits_to_keep=at.kept, **_arguments(model, batch, hidden))
        router.append(sums_of(inner_of(model), output, batch.attention_mask))
        logits: torch.Tensor = output.logits
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
    return replace(answers, router=router[0])


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
        f"{type(inner_of(model)).__name__}: its distribution over the vocabulary cannot be "
        f"compared with another model's, as {why_full_logits(inner_of(model))}; take another "
        "model, or leave lm_head out of the method"
    )


def trained(x_BKX: torch.Tensor, at: TrainedPositions) -> torch.Tensor:
    """[N, X]: the trained positions of the kept columns, or of all columns where the model's code
    ignores ``logits_to_keep``. VideoLLaMA 3 does in transformers 5.23: other positions than the
    trained ones were read, and the loss was 0.3 % off."""
    if x_BKX.shape[1] != len(at.kept):
        return x_BKX[at.rows, at.columns]
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
    last_hidden_state: torch.Tensor = model(**_arguments(model, batch, hidden)).last_hidden_state
    return last_hidden_state


def _arguments(model: nn.Module, batch: Batch, hidden: torch.Tensor | None) -> dict[str, object]:
    # A model without pixels computes something of the placeholders, and says nothing.
    assert batch.pictures is None, "the pictures of a batch were not read"
    entering = {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    packed = () if batch.cu_seqlens is None else (batch.cu_seqlens, batch.branches, batch.part)
    return {
        **entering,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids if batch.axes is None else batch.axes,
        "use_cache": False,
        **batch.media,
        **(packed_arguments(inner_of(model), *packed) if packed else {}),
    }


def inner_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    inner = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]
    return cast(PreTrainedModel, inner)
