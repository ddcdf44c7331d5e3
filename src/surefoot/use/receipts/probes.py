"""Fixed prompts, and what a checkpoint answers: the tokens on which an artefact is compared, by its
loss and its greedy tokens, with a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ...data.example import Message
from ...errors import ModelError, TemplateError
from ...generate.generation import context_length
from ...generate.section import GenerateSection
from ..model_loading import LoadedModel
from .receipt import Artefact

PROMPTS = (
    "Name the capital of France, and a river that flows through it.",
    "What is 17 + 25? Answer with the number only.",
    "Write a Python function that reverses a string.",
    "Translate into German: The weather is nice today.",
    "用一句话介绍长城。",
    "Once upon a time",
)
_LONGEST = 32  # tokens of a response


@dataclass(frozen=True)
class Probe:
    """A prompt and the checkpoint's greedy response to it."""

    ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True)
class ProbeOutputs:
    """What a model computes of the probes."""

    loss_sum: float  # of all tokens but the first of each probe
    num_tokens: int
    logps: Sequence[torch.Tensor]  # [T, V] at the tokens of each response

    @property
    def loss(self) -> float:
        """The mean."""
        return self.loss_sum / self.num_tokens


def probes_of(opened: LoadedModel) -> list[Probe]:
    """The probes of a checkpoint. Raises ``ModelError`` if its context length is too short."""
    limit = context_length(opened.model)
    prompts = [_ids(opened, text) for text in PROMPTS]
    if limit is not None:
        prompts = [ids for ids in prompts if len(ids) + _LONGEST <= limit]
    prompts = [ids for ids in prompts if ids]
    if not prompts:
        raise ModelError(f"{opened.folder}: no probe fits its context length of {limit}")
    found = opened.network.generate(
        prompts,
        GenerateSection(max_new_tokens=_LONGEST, batch_size=len(prompts)),
        seed=0,
        stop_token_ids=opened.stop_token_ids,
    )
    return [Probe((*ids, *one.ids), len(ids)) for ids, one in zip(prompts, found, strict=True)]


def _ids(opened: LoadedModel, text: str) -> list[int]:
    if opened.template is not None:
        try:
            return opened.prompt([Message("user", text)])
        except TemplateError:  # a template for other conversations
            pass
    return opened.continuation(text)


@torch.no_grad()
def outputs_of(model: Any, probes: Sequence[Probe]) -> ProbeOutputs:
    """What a transformers model computes of the probes, each by itself."""
    loss, count, logps = 0.0, 0, []
    rows = model.get_input_embeddings().weight.shape[0]
    if (largest := max(i for probe in probes for i in probe.ids)) >= rows:
        raise ModelError(f"it has embeddings of {rows} tokens, but the probes have token {largest}")
    for probe in probes:
        ids = torch.tensor([probe.ids], device=next(model.parameters()).device)
        found_TV = F.log_softmax(model(input_ids=ids).logits[0].float(), -1).cpu()[:-1]
        targets = ids[0, 1:].cpu()
        loss -= float(found_TV.gather(1, targets[:, None]).double().sum())
        count += len(targets)
        logps.append(found_TV[probe.num_prompt - 1 :])
    return ProbeOutputs(loss, count, logps)


EXACT = 1e-3  # other orders of summation in float32
BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(("float32", "f32"), EXACT),
    **dict.fromkeys(("bfloat16", "float16", "bf16", "f16"), 0.02),
    **dict.fromkeys(("q8_0", "w8a8", "fp8", "fp8-block", "q6_k"), 0.1),
    **dict.fromkeys(("q5_k_m", "q5_k_s", "q5_0"), 0.2),
    **dict.fromkeys(("q4_k_m", "q4_k_s", "q4_0", "w4a16"), 0.5),
}
"""Nats per token by which the loss may differ, and by which the artefact's greedy tokens may be
less probable than the checkpoint's. Chosen here, with room over what small models show."""


@dataclass(frozen=True)
class ProbeComparison:
    """The figures."""

    loss: float
    checkpoint_loss: float
    num_tokens: int
    equal_tokens: int
    compared_tokens: int
    regret: float
    """Nats per token by which the checkpoint finds the artefact's greedy tokens less probable than
    its own: 0 where they are equal, and nearly so where it is undecided."""
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether the artefact computes the same, up to its format."""
        difference = abs(self.loss - self.checkpoint_loss)
        return math.isfinite(self.loss) and difference <= self.bound and self.regret <= self.bound

    def as_data(self) -> dict[str, Any]:
        """For the receipt."""
        return {**asdict(self), "passed": self.is_within}

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, of the checkpoint {self.checkpoint_loss:.4f}; "
            f"{self.equal_tokens} of {self.compared_tokens} greedy tokens are equal, the others "
            f"cost {self.regret:.4f} nats per token (bound of both {self.bound:g})"
        )


def compare(artefact: Artefact, found: ProbeOutputs, expected: ProbeOutputs) -> ProbeComparison:
    """The outputs of an artefact beside those of its checkpoint."""
    equal, regret, count = 0, 0.0, 0
    for own, theirs in zip(found.logps, expected.logps, strict=True):
        width = min(own.shape[1], theirs.shape[1])  # a file may have rows without a token
        best, chosen = theirs.argmax(1), own[:, :width].argmax(1)
        rows = torch.arange(len(best))
        equal += int((best == chosen).sum())
        regret += float((theirs[rows, best] - theirs[rows, chosen]).double().sum())
        count += len(best)
    return ProbeComparison(
        found.loss,
        expected.loss,
        found.num_tokens,
        equal,
        count,
        regret / count,
        bound_of(artefact),
    )


def bound_of(artefact: Artefact) -> float:
    """Of its format."""
    return BOUNDS.get(artefact.type, EXACT) if artefact.is_rounded else EXACT
