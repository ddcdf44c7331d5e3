"""Divergence between the next-token distributions of two models over the full vocabulary, directly
from the hidden states of both: the logits of a batch never exist at once.

Projection, softmax and divergence run in chunks of positions. The backward pass computes the logits
of both models again, chunk by chunk; what is kept are hidden states.

Distributions: p of the other model (the teacher), q of the model that is trained, both softmax of
logits / T. With m = beta p + (1 - beta) q and s the logits of q before they are divided by T:

    forward_kl  sum p (log p - log q)                           d / ds = (q - p) / T
    reverse_kl  sum q (log q - log p) = D                       d / ds = q (log q - log p - D) / T
    jsd         beta KL(p || m) + (1 - beta) KL(q || m)         d / ds = (1 - beta) q
                (arXiv:2306.13649, eq. 1)                         (log q - log m - KL(q || m)) / T

A model may have more rows than the tokenizer has tokens, because matrices are padded. Words that
only one of the models has take no part.

Shapes: N positions, C of them in a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from ...batch import Divergence
from .chunked_cross_entropy import Head, HeadGradients, uncapped, wide

# Of log q, log p [C, V] and beta: the divergences [C], and their gradients with respect to the
# logits of q over T [C, V].
Compare = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TargetDistribution:
    """Distributions to be compared with, as what they are computed from."""

    hidden: torch.Tensor  # [N, D] of the other model
    head: Head

    def cast(self) -> TargetDistribution:
        """With a matrix of the dtype it is multiplied in."""
        return replace(self, head=self.head.cast())


def divergences(
    head: Head,
    hidden_ND: torch.Tensor,
    labels_N: torch.Tensor,
    target: TargetDistribution,
    divergence: Divergence,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] the divergence from ``target`` at each position, and [N] the log-probability of each
    label; float32 or wider."""
    found = _Divergences.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head.weight, head.bias, labels_N, head, target, divergence
    )
    return cast(tuple[torch.Tensor, torch.Tensor], found)


def forward_kl(
    logq_CV: torch.Tensor, logp_CV: torch.Tensor, _beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p || q): the model covers all that the other one may say."""
    p_CV = logp_CV.exp()
    return (p_CV * (logp_CV - logq_CV)).sum(-1), logq_CV.exp() - p_CV


def reverse_kl(
    logq_CV: torch.Tensor, logp_CV: torch.Tensor, _beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(q || p): the model says only what the other one may say."""
    q_CV, differences_CV = logq_CV.exp(), logq_CV - logp_CV
    found_C = (q_CV * differences_CV).sum(-1)
    return found_C, q_CV * (differences_CV - found_C[:, None])


def jsd(
    logq_CV: torch.Tensor, logp_CV: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The generalized Jensen-Shannon divergence: bounded, between both."""
    logm_CV = torch.logaddexp(logp_CV + math.log(beta), logq_CV + math.log1p(-beta))
    q_CV, differences_CV = logq_CV.exp(), logq_CV - logm_CV
    of_q_C = (q_CV * differences_CV).sum(-1)
    of_p_C = (logp_CV.exp() * (logp_CV - logm_CV)).sum(-1)
    slopes_CV = (1 - beta) * q_CV * (differences_CV - of_q_C[:, None])
    return beta * of_p_C + (1 - beta) * of_q_C, slopes_CV


KINDS: dict[str, Compare] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}


class _Divergences(torch.autograd.Function):
    """Positions have factors of their own, so the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        head: Head,
        target: TargetDistribution,
        divergence: Divergence,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.softcap, ctx.dtype = head.softcap, head.dtype
        ctx.target, ctx.divergence = target, divergence
        head, target = replace(head, weight=weight_VD, bias=bias_V).cast(), target.cast()
        found_N = hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        logps_N = torch.empty_like(found_N)
        for chunk in head.chunks(len(hidden_ND)):
            logits_CV = head.logits(hidden_ND[chunk])
            logps_CV = F.log_softmax(logits_CV, -1)
            logps_N[chunk] = logps_CV.gather(1, labels_N[chunk, None])[:, 0]
            found_N[chunk] = _compared(logits_CV, target, chunk, divergence)[0]
            del logits_CV, logps_CV  # or they are there still when the next ones are made
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        return found_N, logps_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        of_found_N, of_logps_N = gradients
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        head = Head(weight_VD, bias_V, ctx.softcap, ctx.dtype)
        found = HeadGradients.of(head, hidden_ND, ctx.needs_input_grad)
        head, target = found.head, ctx.target.cast()
        for chunk in head.chunks(len(hidden_ND)):
            logits_CV = head.logits(hidden_ND[chunk])
            slopes_CV = torch.zeros_like(logits_CV)
            if of_logps_N is not None:
                factors_C1 = of_logps_N[chunk, None]
                slopes_CV -= F.softmax(logits_CV, -1) * factors_C1
                slopes_CV.scatter_add_(1, labels_N[chunk, None], factors_C1)
            if of_found_N is not None:
                more_CV = _compared(logits_CV, target, chunk, ctx.divergence)[1]
                more_CV *= of_found_N[chunk, None] / ctx.divergence.temperature
                slopes_CV[:, : more_CV.shape[1]] += more_CV
                del more_CV
            found.add(chunk, uncapped(slopes_CV, logits_CV, head.softcap))
            del logits_CV, slopes_CV
        return *found.sums(hidden_ND, weight_VD, bias_V), None, None, None, None


def _compared(
    logits_CV: torch.Tensor, target: TargetDistribution, chunk: slice, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergences of a chunk, and their gradients with respect to its logits over T."""
    others_CV = target.head.logits(target.hidden[chunk])
    width = min(logits_CV.shape[1], others_CV.shape[1])
    logq_CV, logp_CV = (
        F.log_softmax(x_CV[:, :width] / divergence.temperature, -1)
        for x_CV in (logits_CV, others_CV.to(logits_CV.dtype))
    )
    return KINDS[divergence.kind](logq_CV, logp_CV, divergence.beta)
