"""Fixed prompts, and what a checkpoint answers: the tokens on which an artefact is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ...data.example import Message
from ...errors import ModelError, TemplateError
from ...generate.generation import context_length
from ...generate.section import GenerateSection
from ..model_loading import LoadedModel

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
