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
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from ...batch import Outputs
from ...errors import ModelError
from ..attention.packed import maskless
from .chunked_cross_entropy import Head, Scores, logps, scores, totals

logger = logging.getLogger(__name__)
_SOFTCAP = "final_logit_softcapping"


@dataclass(frozen=True)
class LogprobHead:
    """A head that can return log-probabilities. The model itself must not cap its logits
    meanwhile.
    """

    linear: nn.Linear
    config: PretrainedConfig
    softcap: float | None

    def run(
        self,
        model: Callable[[], torch.Tensor],
        trained: Callable[[torch.Tensor], torch.Tensor],
        labels_N: torch.Tensor,
        needs: Collection[str],
        smoothing: float,
    ) -> Outputs:
        """Run ``model``, which returns the output of its head: what is ``needed`` at the
        ``trained`` positions, whose labels these are.
        """
        held: list[Scores] = []
        is_plain = not smoothing and set(needs) <= {"total", "logps"}

        def answer(hidden_BKD: torch.Tensor) -> torch.Tensor:
            hidden_ND = trained(hidden_BKD)
            if set(needs) <= {"total"}:
                return torch.stack(totals(self._head(hidden_ND), hidden_ND, labels_N, smoothing))
            if is_plain:
                return logps(self._head(hidden_ND), hidden_ND, labels_N)
            held.append(scores(self._head(hidden_ND), hidden_ND, labels_N))
            return torch.stack([held[0].logps, held[0].entropies, held[0].means])

        with _answering(self, answer):
            found = model()
        if not held and "logps" in needs:
            return Outputs(logps=found, total=found.sum())
        if not held:
            learnt, total = found
            return Outputs(total=total, smoothed=learnt) if smoothing else Outputs(total=learnt)
        logps_N, entropies_N, means_N = found
        total, predictions_N = logps_N.sum(), held[0].predictions
        smoothed = (1.0 - smoothing) * total + smoothing * means_N.sum() if smoothing else None
        return Outputs(logps_N, total, smoothed, entropies_N, predictions=predictions_N)

    def _head(self, hidden: torch.Tensor) -> Head:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return Head(self.linear.weight, self.linear.bias, self.softcap, dtype)


@contextlib.contextmanager
def _answering(head: LogprobHead, answer: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    config = head.config
    vars(head.linear)["forward"] = answer
    if head.softcap is not None:
        setattr(config, _SOFTCAP, None)
    try:
        yield
    finally:
        del vars(head.linear)["forward"]
        if head.softcap is not None:
            setattr(config, _SOFTCAP, head.softcap)


@torch.no_grad()
def asked_head(model: PreTrainedModel) -> LogprobHead | None:
    """The head of ``model``, if it can be replaced: a plain matrix, whose result the model
    returns unchanged. Runs the model on two tokens.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return None
    config = model.config.get_text_config()
    head = LogprobHead(linear, config, getattr(config, _SOFTCAP, None))
    mark = torch.zeros((), device=linear.weight.device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=linear.weight.device)
    try:
        with _answering(head, lambda _: mark), maskless(model, 2) as arguments:
            found = model(input_ids=ids, use_cache=False, **arguments).logits
    except (TypeError, ValueError, RuntimeError, AttributeError, ModelError) as error:
        logger.debug("%s: the output head is not replaced: %s", type(model).__name__, error)
        return None
    return head if found is mark else None
