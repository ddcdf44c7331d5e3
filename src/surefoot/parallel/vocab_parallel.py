"""Vocabulary parallelism of logits: their log-probabilities without a rank that has all of them.

If the plan shards the output head by columns, each rank has the logits of its words. No training
rank ever has the full logits. For every trained position, the ranks exchange three numbers instead:
the largest logit, the sum of the exponentials, and the label's own logit, as in Megatron-LM
(arXiv:1909.08053). ``outputs`` calls this class in place of its own log-softmax.

Shapes: N trained positions, v the words of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from ._collectives import part, reduce_from_tp_region
from .tp_plan import cuts_vocabulary
from .world import Axis, World

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel


def cut_vocabulary(model: PreTrainedModel, world: World) -> VocabParallelLogits | None:
    """The vocabulary of ``model`` as it is sharded over ``world``; None if it is not."""
    if world.mesh is None or world.tp == 1 or not cuts_vocabulary(model):
        return None
    return VocabParallelLogits(world.along("tp"), model.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class VocabParallelLogits:
    """What ``outputs`` needs of logits, computed by all ranks of ``axis`` together."""

    axis: Axis
    size: int  # of the whole vocabulary

    def logps(self, logits_Nv: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of each label."""
        logps_N = _VocabParallelLogps.apply(  # type: ignore[no-untyped-call]
            self._at_least_one(logits_Nv), labels_N - self._first, self.axis
        )
        return cast(torch.Tensor, logps_N)

    def means(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] log-probability of a word, averaged over the full vocabulary: E[logit] - log Z."""
        largest_N = self.axis.largest(self._at_least_one(logits_Nv.detach()).amax(-1))
        logits_Nv = logits_Nv - largest_N[:, None]
        sums_2N = torch.stack([logits_Nv.exp().sum(-1), logits_Nv.sum(-1)])
        total_N, sum_N = reduce_from_tp_region(sums_2N, self.axis)
        means_N: torch.Tensor = sum_N / self.size - total_N.log()
        return means_N

    def entropies(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] entropy of each distribution in nats: log Z - E[logit]."""
        logits_Nv = self._at_least_one(logits_Nv)
        largest_N = self.axis.largest(logits_Nv.detach().amax(-1))
        logits_Nv = logits_Nv - largest_N[:, None]
        weights_Nv = logits_Nv.exp()
        sums_2N = torch.stack([weights_Nv.sum(-1), (weights_Nv * logits_Nv).sum(-1)])
        total_N, product_N = reduce_from_tp_region(sums_2N, self.axis)
        entropies_N: torch.Tensor = total_N.log() - product_N / total_N
        return entropies_N

    def predictions(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """[N] the most probable word; of equal ones the first."""
        best_N, index_N = self._at_least_one(logits_Nv.detach()).max(-1)
        is_best_N = best_N == self.axis.largest(best_N)
        return -self.axis.largest(-torch.where(is_best_N, index_N + self._first, self.size))

    @property
    def width(self) -> int:
        """Words on this rank."""
        local_words = part(self.size, self.axis)
        return int(local_words.stop - local_words.start)

    @property
    def _first(self) -> int:
        first: int = part(self.size, self.axis).start
        return first

    def _at_least_one(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """At least one word, an impossible one if none is on this rank."""
        assert logits_Nv.shape[-1] == self.width
        if self.width:
            return logits_Nv
        return F.pad(logits_Nv, (0, 1), value=torch.finfo(logits_Nv.dtype).min)


class _VocabParallelLogps(torch.autograd.Function):
    """Saves the probabilities for the backward pass, and nothing else of that size."""

    @staticmethod
    def forward(
        ctx: Any, logits_Nv: torch.Tensor, labels_N: torch.Tensor, axis: Axis
    ) -> torch.Tensor:
        largest_N = axis.largest(logits_Nv.amax(-1))
        probs_Nv = logits_Nv - largest_N[:, None]
        is_here_N = (labels_N >= 0) & (labels_N < logits_Nv.shape[-1])
        labels_N = labels_N.where(is_here_N, 0)
        logit_N = probs_Nv.gather(-1, labels_N[:, None])[:, 0] * is_here_N
        total_N, logit_N = axis.sum(torch.stack([probs_Nv.exp_().sum(-1), logit_N]))
        ctx.save_for_backward(probs_Nv.div_(total_N[:, None]), labels_N, is_here_N)
        logps_N: torch.Tensor = logit_N - total_N.log()
        return logps_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_N,) = gradients
        probs_Nv, labels_N, is_here_N = ctx.saved_tensors
        gradient_Nv = probs_Nv * -gradient_N[:, None]
        gradient_Nv.scatter_add_(-1, labels_N[:, None], (gradient_N * is_here_N)[:, None])
        return gradient_Nv, None, None
