"""The output head in chunks of positions: log-probabilities, entropies and divergences directly
from hidden states. The logits of a batch never exist at once.

When the gradients of a chunk are computed depends on what is needed of it:

=====================================  ===========================================================
only the sum of log-probabilities      at once, while its probabilities exist (``totals``)
each of them, with a frozen matrix     the same, to be scaled by each position's factor (``logps``)
anything else                          in the backward pass, which computes the logits again
=====================================  ===========================================================

A smoothed label (arXiv:1512.00567) gives the label's word the probability 1 - s + s / V, and every
other word s / V.

``divergences`` compares the next-token distributions of two models over the full vocabulary: p of
the other model (the teacher), q of the model that is trained, both softmax of logits / T. With
m = beta p + (1 - beta) q and s the logits of q before they are divided by T:

    forward_kl  sum p (log p - log q)                           d / ds = (q - p) / T
    reverse_kl  sum q (log q - log p) = D                       d / ds = q (log q - log p - D) / T
    jsd         beta KL(p || m) + (1 - beta) KL(q || m)         d / ds = (1 - beta) q
                (arXiv:2306.13649, eq. 1)                         (log q - log m - KL(q || m)) / T

Shapes: N positions, C of them in a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..batch import Divergence
from .rms_norm import tiles

TOP = 20  # words of the entropies that EAFT weighs tokens by
# Positions. Of 151,936 words (Qwen), float32 logits of a whole row of 8,192 are 5 GB, and their
# gradients as much again. Below about 128 the matrix is read too often; with more than a few
# hundred the chunk of a small model leaves the cache (docs/decisions/0031).
CHUNK = 384
# Log-probability of each label [C], the sum of the log-probabilities of all words [C], and, of
# minus the sum of the smoothed labels' log-probabilities, the gradient with respect to the logits
# [C, V].
ChunkGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Head:
    """The linear layer from hidden states to logits, which may be capped: tanh(x / cap) * cap."""

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]
    softcap: float | None = None
    dtype: torch.dtype | None = None  # what is multiplied in; None: the matrix's own

    def cast(self) -> Head:
        """The same with a matrix of its ``dtype``."""
        dtype = self.dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    def linear(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """[C, V] logits before capping, in the dtype of the matrix."""
        return F.linear(hidden_CD.to(self.weight.dtype), self.weight, self.bias)

    def logits(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """[C, V] in float32 or wider."""
        return capped(self.linear(hidden_CD), self.softcap)

    def gradients_of(
        self, hidden_CD: torch.Tensor, labels_C: torch.Tensor, smoothing: float, trains: bool
    ) -> ChunkGradients:
        """Log-probabilities and logit gradients of one chunk; gradients only if one ``trains``."""
        logits_CV = self.logits(hidden_CD)
        # Where nobody looks at the logits again, their place will do; seen to be right on CPUs.
        reused_CV = logits_CV if self.softcap is None and logits_CV.is_cpu else None
        logps_CV = torch.log_softmax(logits_CV, -1, out=reused_CV)
        logps_C = logps_CV.gather(1, labels_C[:, None])[:, 0]
        sums_C = logps_CV.sum(-1) if smoothing else torch.zeros_like(logps_C)
        if not trains:
            return logps_C, sums_C, None
        gradients_CV = logps_CV.exp_()
        if smoothing:
            gradients_CV.sub_(smoothing / logits_CV.shape[1])
        shares_C1 = torch.full_like(logps_C[:, None], smoothing - 1.0)
        gradients_CV.scatter_add_(1, labels_C[:, None], shares_C1)
        return logps_C, sums_C, uncapped(gradients_CV, logits_CV, self.softcap)

    def chunks(self, hidden_ND: torch.Tensor) -> Iterator[slice]:
        """Consecutive chunks of positions."""
        return tiles(hidden_ND, CHUNK)


@dataclass(frozen=True)
class Scores:
    """The head's outputs at N positions."""

    logps: torch.Tensor  # [N] float32, log-probability of each label
    entropies: torch.Tensor  # [N] float32, nats
    means: torch.Tensor  # [N] float32, log-probability of a word, on average over the vocabulary
    predictions: torch.Tensor  # [N] int64, the most probable word
    top_entropies: torch.Tensor  # [N] float32, of the TOP most probable words; 0 unless wanted


def totals(
    head: Head, hidden_ND: torch.Tensor, labels_N: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums of the log-probabilities of smoothed labels, and of labels, and [N] each of these,
    of which only the first has a gradient."""
    sums = _Totals.apply(hidden_ND, head.weight, head.bias, labels_N, head, smoothing)  # type: ignore[no-untyped-call]
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], sums)


def logps(head: Head, hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """[N] float32 log-probability of each label."""
    logps_N = _ChunkedLogps.apply(hidden_ND, head.weight, head.bias, labels_N, head)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, logps_N)


def scores(
    head: Head, hidden_ND: torch.Tensor, labels_N: torch.Tensor, *, top: bool = False
) -> Scores:
    """All outputs at each position, with entropies of the ``top`` words if they are wanted.
    Predictions and these have no gradients."""
    return Scores(*_Scores.apply(hidden_ND, head.weight, head.bias, labels_N, head, top))  # type: ignore[no-untyped-call]


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
    divergences_and_logps = _Divergences.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head.weight, head.bias, labels_N, head, target, divergence
    )
    return cast(tuple[torch.Tensor, torch.Tensor], divergences_and_logps)


class _Totals(torch.autograd.Function):
    """d log p(label) / d logits = label - p: known without the backward pass, up to a factor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        head: Head,
        smoothing: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head = replace(head, weight=weight_VD, bias=bias_V)
        gradients = HeadGradients.of(head, hidden_ND, ctx.needs_input_grad)
        head = gradients.head
        logps_N = hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        total, of_all_words = hidden_ND.new_zeros(2, dtype=wide(hidden_ND.dtype)).unbind()
        trains = any(ctx.needs_input_grad)
        for chunk in head.chunks(hidden_ND):
            logps_C, sums_C, gradients_CV = head.gradients_of(
                hidden_ND[chunk], labels_N[chunk], smoothing, trains
            )
            total += logps_C.sum()
            logps_N[chunk] = logps_C
            if smoothing:
                of_all_words += sums_C.sum()
            if gradients_CV is not None:
                gradients.add(chunk, gradients_CV)
            del gradients_CV  # or they are there still when the next chunk's logits are made
        ctx.save_for_backward(*gradients.sums(hidden_ND, weight_VD, bias_V))
        ctx.mark_non_differentiable(total, logps_N)
        smoothed = (1.0 - smoothing) * total + smoothing / len(weight_VD) * of_all_words
        return smoothed, total, logps_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = -gradients[0]
        scaled = (None if t is None else t.mul_(factor) for t in ctx.saved_tensors)
        return *scaled, None, None, None


class _ChunkedLogps(torch.autograd.Function):
    """The logit gradients of each position are known up to its own factor, by which those of hidden
    states are scaled later. Those of the matrix are sums over positions: the backward pass
    recomputes them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        head: Head,
    ) -> torch.Tensor:
        ctx.softcap, ctx.dtype = head.softcap, head.dtype
        ctx.is_frozen = not any(ctx.needs_input_grad[1:])
        head = replace(head, weight=weight_VD, bias=bias_V)
        keeps_gradients = ctx.is_frozen and ctx.needs_input_grad[0]
        gradients = HeadGradients.of(head, hidden_ND, (keeps_gradients, False, False))
        logps_N = hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        for chunk in head.chunks(hidden_ND):
            logps_N[chunk], _, gradients_CV = gradients.head.gradients_of(
                hidden_ND[chunk], labels_N[chunk], 0.0, keeps_gradients
            )
            if gradients_CV is not None:
                gradients.add(chunk, gradients_CV)
            del gradients_CV
        if ctx.is_frozen:
            ctx.save_for_backward(gradients.hidden)
        else:
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        return logps_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factors_N1 = -gradients[0][:, None]
        if ctx.is_frozen:
            (hidden_ND,) = ctx.saved_tensors
            return (hidden_ND * factors_N1).to(hidden_ND.dtype), None, None, None, None
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        head = Head(weight_VD, bias_V, ctx.softcap, ctx.dtype)
        head_gradients = HeadGradients.of(head, hidden_ND, ctx.needs_input_grad)
        head = head_gradients.head
        for chunk in head.chunks(hidden_ND):
            gradients_CV = head.gradients_of(hidden_ND[chunk], labels_N[chunk], 0.0, True)[2]
            if gradients_CV is not None:
                head_gradients.add(chunk, gradients_CV.mul_(factors_N1[chunk]))
            del gradients_CV
        return *head_gradients.sums(hidden_ND, weight_VD, bias_V), None, None


class _Scores(torch.autograd.Function):
    """Gradients: logp: onehot - p, mean: 1 / V - p, entropy: -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        head: Head,
        top: bool,
    ) -> tuple[torch.Tensor, ...]:
        ctx.softcap, ctx.dtype = head.softcap, head.dtype
        head = replace(head, weight=weight_VD, bias=bias_V).cast()
        logps_N = hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        entropies_N, means_N = torch.empty_like(logps_N), torch.empty_like(logps_N)
        predictions_N, top_N = torch.empty_like(labels_N), torch.zeros_like(logps_N)
        for chunk in head.chunks(hidden_ND):
            logps_CV = F.log_softmax(head.logits(hidden_ND[chunk]), dim=-1)
            logps_N[chunk] = logps_CV.gather(1, labels_N[chunk, None])[:, 0]
            predictions_N[chunk] = logps_CV.argmax(-1)
            means_N[chunk] = logps_CV.mean(-1)
            entropies_N[chunk] = -(logps_CV.exp() * logps_CV).sum(-1)
            if top:
                top_N[chunk] = top_entropies(logps_CV)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N, entropies_N)
        ctx.mark_non_differentiable(predictions_N, top_N)
        return logps_N, entropies_N, means_N, predictions_N, top_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_logps_N, of_entropies_N, of_means_N = gradients[:3]
        hidden_ND, weight_VD, bias_V, labels_N, entropies_N = ctx.saved_tensors
        head = Head(weight_VD, bias_V, ctx.softcap, ctx.dtype)
        head_gradients = HeadGradients.of(head, hidden_ND, ctx.needs_input_grad)
        head = head_gradients.head
        for chunk in head.chunks(hidden_ND):
            logits_CV = head.logits(hidden_ND[chunk])
            logps_CV = F.log_softmax(logits_CV, dim=-1)
            entropies_C1, entropy_C1 = entropies_N[chunk, None], of_entropies_N[chunk, None]
            logp_C1, mean_C1 = of_logps_N[chunk, None], of_means_N[chunk, None]
            weights_CV = logp_C1 + mean_C1 + entropy_C1 * (logps_CV + entropies_C1)
            gradients_CV = mean_C1 / len(weight_VD) - logps_CV.exp() * weights_CV
            gradients_CV.scatter_add_(1, labels_N[chunk, None], logp_C1)
            head_gradients.add(chunk, uncapped(gradients_CV, logits_CV, head.softcap))
        return *head_gradients.sums(hidden_ND, weight_VD, bias_V), None, None, None


def top_entropies(logits_CV: torch.Tensor) -> torch.Tensor:
    """[C] entropy in nats of the TOP most probable words, as if there were no others."""
    top_CK = logits_CV.detach().topk(min(TOP, logits_CV.shape[-1]), dim=-1).values
    logps_CK = F.log_softmax(top_CK, dim=-1)
    return -(logps_CK.exp() * logps_CK).sum(-1)


class _Divergences(torch.autograd.Function):
    """Positions have factors of their own, so the backward pass computes the logits of both models
    again, chunk by chunk; what is kept for it are hidden states."""

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
        divergences_N = hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype))
        logps_N = torch.empty_like(divergences_N)
        for chunk in head.chunks(hidden_ND):
            logits_CV = head.logits(hidden_ND[chunk])
            logps_CV = F.log_softmax(logits_CV, -1)
            logps_N[chunk] = logps_CV.gather(1, labels_N[chunk, None])[:, 0]
            divergences_N[chunk] = _compared(logits_CV, target, chunk, divergence)[0]
            del logits_CV, logps_CV  # or they are there still when the next ones are made
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N)
        return divergences_N, logps_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        of_divergences_N, of_logps_N = gradients
        hidden_ND, weight_VD, bias_V, labels_N = ctx.saved_tensors
        head = Head(weight_VD, bias_V, ctx.softcap, ctx.dtype)
        head_gradients = HeadGradients.of(head, hidden_ND, ctx.needs_input_grad)
        head, target = head_gradients.head, ctx.target.cast()
        for chunk in head.chunks(hidden_ND):
            logits_CV = head.logits(hidden_ND[chunk])
            gradients_CV = torch.zeros_like(logits_CV)
            if of_logps_N is not None:
                factors_C1 = of_logps_N[chunk, None]
                gradients_CV -= F.softmax(logits_CV, -1) * factors_C1
                gradients_CV.scatter_add_(1, labels_N[chunk, None], factors_C1)
            if of_divergences_N is not None:
                of_divergence_CV = _compared(logits_CV, target, chunk, ctx.divergence)[1]
                of_divergence_CV *= of_divergences_N[chunk, None] / ctx.divergence.temperature
                gradients_CV[:, : of_divergence_CV.shape[1]] += of_divergence_CV
                del of_divergence_CV
            head_gradients.add(chunk, uncapped(gradients_CV, logits_CV, head.softcap))
            del logits_CV, gradients_CV
        return *head_gradients.sums(hidden_ND, weight_VD, bias_V), None, None, None, None


def _compared(
    logits_CV: torch.Tensor, target: TargetDistribution, chunk: slice, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergences of a chunk, and their gradients with respect to its logits over T."""
    others_CV = target.head.logits(target.hidden[chunk])
    # Matrices are padded to more rows than the tokenizer has tokens, each model's to its own
    # number: words that only one of them has take no part.
    width = min(logits_CV.shape[1], others_CV.shape[1])
    logq_CV, logp_CV = (
        F.log_softmax(x_CV[:, :width] / divergence.temperature, -1)
        for x_CV in (logits_CV, others_CV.to(logits_CV.dtype))
    )
    return KINDS[divergence.kind](logq_CV, logp_CV, divergence.beta)


# Of log q, log p [C, V] and beta: the divergences [C], and their gradients with respect to the
# logits of q over T [C, V].
Compare = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


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
    gradients_CV = (1 - beta) * q_CV * (differences_CV - of_q_C[:, None])
    return beta * of_p_C + (1 - beta) * of_q_C, gradients_CV


KINDS: dict[str, Compare] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}


@dataclass(frozen=True)
class HeadGradients:
    """Sums over chunks, for everything trainable; at least float32 where they are sums."""

    head: Head  # as it is multiplied
    inputs: torch.Tensor  # [N, D]
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @staticmethod
    def of(head: Head, inputs: torch.Tensor, needed: tuple[bool, ...]) -> HeadGradients:
        """Zeros."""
        weight, bias = head.weight, head.bias

        def room(like: torch.Tensor) -> torch.Tensor:  # the first chunk fills it, if there is one
            make = torch.empty_like if len(inputs) else torch.zeros_like
            return make(like, dtype=wide(like.dtype))

        return HeadGradients(
            head.cast(),
            inputs,
            torch.empty_like(inputs) if needed[0] else None,
            room(weight) if needed[1] else None,
            None if bias is None or not needed[2] else room(bias),
        )

    def add(self, chunk: slice, gradients_CV: torch.Tensor) -> None:
        """Add one chunk's gradients."""
        is_added = chunk.start > 0
        if self.bias is not None:
            self.bias.copy_(self.bias + gradients_CV.sum(0) if is_added else gradients_CV.sum(0))
        cast_CV = gradients_CV.to(self.head.weight.dtype)
        if self.hidden is not None:
            self.hidden[chunk] = (cast_CV @ self.head.weight).to(self.hidden.dtype)
        if self.weight is not None:
            inputs_CD = self.inputs[chunk].to(cast_CV.dtype)
            if cast_CV.dtype == self.weight.dtype:
                self.weight.addmm_(cast_CV.t(), inputs_CD, beta=int(is_added))
            elif is_added:
                self.weight.add_(cast_CV.t() @ inputs_CD)
            else:
                self.weight.copy_(cast_CV.t() @ inputs_CD)

    def sums(self, *likes: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
        """The gradients of hidden states, matrix and bias, in their own dtypes."""
        for gradient, like in zip((self.hidden, self.weight, self.bias), likes, strict=True):
            yield None if gradient is None or like is None else gradient.to(like.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def capped(logits_CV: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The capped logits, in float32 or wider: tanh(x / cap) * cap."""
    logits_CV = logits_CV.to(wide(logits_CV.dtype))
    return logits_CV if softcap is None else torch.tanh(logits_CV / softcap) * softcap


def uncapped(
    gradients_CV: torch.Tensor, logits_CV: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Gradients before the cap from those after: d(cap tanh(x / cap))/dx = 1 - tanh^2(x / cap)."""
    return gradients_CV if softcap is None else gradients_CV * (1 - (logits_CV / softcap).square())
