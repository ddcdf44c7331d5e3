"""Replace lm_head's forward pass by one that returns label log-probabilities and never builds the
full logits.

The replacement is active while the model runs. So the weights stay where the model expects them
(gathered, if they are sharded), and no forward pass of a model is rewritten. Operations that the
model applies to logits afterwards would be applied to these outputs. So only models are supported
that apply none, or a cap that is known.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ...batch import Outputs, OutputSpec
from ...errors import ModelError, first_line
from ..attention.packed import one_document
from ..meta_tensors import on_meta, once_per_architecture
from .chunked_cross_entropy import Head, Scores, logps, scores, totals, wide
from .divergence import TargetDistribution, divergences

logger = logging.getLogger(__name__)
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
        held: list[Scores] = []

        def answer(hidden_BKD: torch.Tensor) -> torch.Tensor:
            hidden_ND = trained(hidden_BKD)
            if not is_valued:
                return self._answer(hidden_ND, labels_N, spec, held)
            assert values is not None
            values_N: torch.Tensor = values(hidden_ND.to(values.weight.dtype))[:, 0]
            # not a view: FSDP2 warns of what in-place operations on one would do
            values_N = values_N.clone().to(wide(values_N.dtype))
            if not needs:
                return values_N
            each = replace(spec, outputs=(*needs, "logps"))  # one number for each position
            rows_XN = self._answer(hidden_ND, labels_N, each, held)
            rows_XN = rows_XN if rows_XN.ndim == 2 else rows_XN[None]
            return torch.cat([rows_XN, values_N[None]])

        with _answering(self, answer):
            found = model()
        if is_valued:
            values_N = found if not needs else found[-1]
            if not needs:
                return Outputs(values=values_N)
            found = found[0] if len(found) == 2 else found[:-1]
            needs |= {"logps"}
            return replace(_outputs(found, held, needs, smoothing), values=values_N)
        return _outputs(found, held, needs, smoothing)

    def target(
        self,
        model: Callable[[], torch.Tensor],
        trained: Callable[[torch.Tensor], torch.Tensor],
    ) -> TargetDistribution:
        """Run ``model`` without its head, for others to be compared with its distributions at the
        ``trained`` positions."""
        held: list[TargetDistribution] = []

        def answer(hidden_BKD: torch.Tensor) -> torch.Tensor:
            hidden_ND = trained(hidden_BKD)
            held.append(
                TargetDistribution(*self._head(hidden_ND, 1.0))
            )  # gathered now, if it is sharded
            return hidden_ND

        with _answering(self, answer):
            model()
        return held[0]

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
            found_N, logps_N = divergences(head, hidden_ND, labels_N, target, divergence)
            return torch.stack([found_N] if is_alone else [found_N, logps_N])

        with _answering(self, answer):
            found = model()
        return Outputs(divergences=found[0], logps=None if is_alone else found[1])

    def _answer(
        self, hidden_ND: torch.Tensor, labels_N: torch.Tensor, spec: OutputSpec, held: list[Scores]
    ) -> torch.Tensor:
        """What the head returns: the sum of log-probabilities twice, each of them, or rows of
        log-probabilities, entropies and means; then all scores are in ``held``."""
        needs = set(spec.outputs)
        hidden_ND, head = self._head(hidden_ND, spec.temperature)
        if needs <= {"total"}:
            return torch.stack(totals(head, hidden_ND, labels_N, spec.smoothing))
        if not spec.smoothing and needs <= {"total", "logps"}:
            return logps(head, hidden_ND, labels_N)
        held.append(scores(head, hidden_ND, labels_N, top="top_entropies" in needs))
        return torch.stack([held[0].logps, held[0].entropies, held[0].means])

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
    found: torch.Tensor, held: list[Scores], needs: Collection[str], smoothing: float
) -> Outputs:
    """The outputs that a head has returned; see ``LogprobHead._answer``."""
    if not held and "logps" in needs:
        return Outputs(logps=found, total=found.sum())
    if not held:
        learnt, total = found
        return Outputs(total=total, smoothed=learnt) if smoothing else Outputs(total=learnt)
    logps_N, entropies_N, means_N = found
    total, predictions_N = logps_N.sum(), held[0].predictions
    smoothed = (1.0 - smoothing) * total + smoothing * means_N.sum() if smoothing else None
    return Outputs(
        logps_N,
        total,
        smoothed,
        entropies_N,
        top_entropies=held[0].top_entropies if "top_entropies" in needs else None,
        predictions=predictions_N,
    )


@contextlib.contextmanager
def _answering(head: LogprobHead, answer: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    config, own = head.config, vars(head.linear)
    before = own.get("forward")
    own["forward"] = answer
    if head.softcap is not None:  # in its dict: some configurations check types, and None is none
        vars(config)[_SOFTCAP] = None
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before
        if head.softcap is not None:
            vars(config)[_SOFTCAP] = head.softcap


def logprob_head_of(model: PreTrainedModel) -> LogprobHead | None:
    """The head of ``model``, if it can be replaced: a plain matrix, whose result the model returns
    unchanged."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        _say_full_logits(model, "its output head is more than a product with a matrix")
        return None
    return _head(model, linear) if _returns_result(model) else None


def _say_full_logits(model: PreTrainedModel, why: str) -> None:
    logger.info(
        "%s: the output head computes full logits, which takes more time and memory: %s",
        type(model).__name__,
        why,
    )


def _head(model: PreTrainedModel, linear: nn.Linear) -> LogprobHead:
    config = model.config.get_text_config()
    return LogprobHead(linear, config, getattr(config, _SOFTCAP, None))


@once_per_architecture
@torch.no_grad()
def _returns_result(model: PreTrainedModel) -> bool:
    """Whether ``model`` returns what its head does, unchanged. Runs the model's code on two tokens,
    on the meta device, so that the answer is the same whether they are there yet."""
    linear = model.get_output_embeddings()
    # what a quantized model multiplies by cannot be put aside; it always has its values
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    device = torch.device("meta") if is_plain else linear.weight.device
    mark = torch.zeros((), device=device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    blank = on_meta(model) if is_plain else contextlib.nullcontext()
    try:
        with _answering(_head(model, linear), lambda _: mark), blank:
            given = {"input_ids": ids, "attention_mask": None, "use_cache": False}
            found = model(**given, **one_document(model, 2)).logits
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, ModelError) as error:
        _say_full_logits(model, first_line(error))
        return False
    if found is not mark:
        _say_full_logits(model, "it changes the logits after its output head")
    return found is mark
