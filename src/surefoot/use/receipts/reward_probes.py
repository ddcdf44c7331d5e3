"""Fixed conversations, and the rewards that a reward model and its artefact give them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...batch import SCORES
from ...data.example import Example, Message
from ...data.text.collation import collate
from ...data.text.ranking import up_to_last_label
from ...errors import ModelError, TemplateError
from ...generate.generation import context_length
from ...model.pretrained.loading import device
from ..model_loading import LoadedModel
from .probes import PROMPTS, bound_of
from .receipt import Artefact

_RESPONSES = ("Paris is on the Seine; the sum is 42.", "I do not know.")


@dataclass(frozen=True)
class RewardComparison:
    """The figures."""

    num_probes: int
    largest: float  # absolute reward of the checkpoint
    difference: float  # the largest
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether the artefact computes the same, up to its format. A reward is a logit, so its
        bound is that of losses; of large ones, relative to them."""
        return math.isfinite(self.difference) and self.difference <= self.bound

    def as_data(self) -> dict[str, Any]:
        """For the receipt."""
        return {**asdict(self), "passed": self.is_within}

    def __str__(self) -> str:
        return (
            f"the rewards of {self.num_probes} fixed conversations, up to {self.largest:.3f}, "
            f"differ by at most {self.difference:.5f} (bound {self.bound:g})"
        )


def encoded_probes(opened: LoadedModel) -> list[list[int]]:
    """The token ids of the conversations that fit the model's positions, up to the end token of the
    response. Raises ``ModelError`` if there are none."""
    limit = context_length(opened.model)
    section = replace(opened.codec.section, cutoff_len=limit or sys.maxsize)
    chats = [
        Example((Message("user", prompt), Message("assistant", response)), origin="a probe")
        for prompt in PROMPTS
        for response in _RESPONSES
    ]
    try:
        outcomes = list(opened.codec.with_section(section).encode_chats(chats))
    except TemplateError as error:
        raise ModelError(f"{opened.folder}: no rewards can be compared: {error}") from None
    found = [up_to_last_label(one[-1]) for one in outcomes if isinstance(one, list | tuple)]
    if not found:
        raise ModelError(f"{opened.folder}: no probe fits its context length of {limit}")
    return [[int(i) for i in one["input_ids"]] for one in found]


def rewards_of(opened: LoadedModel, probes: Sequence[Sequence[int]]) -> list[float]:
    """Of the checkpoint."""
    found = []
    with opened.network.evaluating():
        for ids in probes:
            item = {"input_ids": list(ids), "labels": list(ids)}
            batch = collate([item], packing=False).to(device())
            values = opened.network.forward(batch, SCORES).values
            assert values is not None
            found += values.double().tolist()
    return found


@torch.no_grad()
def artefact_rewards(
    model: Any, head: torch.Tensor | None, probes: Sequence[Sequence[int]]
) -> list[float]:
    """Of a transformers model for sequence classification, or of the decoder of a language model
    whose last hidden states the ``head`` [1, D] reads."""
    found = []
    for ids in probes:
        inputs = torch.tensor([ids], device=device())
        if head is None:
            found.append(model(input_ids=inputs).logits[0, 0].item())
        else:
            states_TD = model.get_decoder()(input_ids=inputs).last_hidden_state[0]
            found.append((states_TD[-1].float() @ head[0].to(states_TD.device)).item())
    return found


def compare_rewards(
    artefact: Artefact, found: Sequence[float], expected: Sequence[float]
) -> RewardComparison:
    """The rewards of an artefact beside those of its checkpoint."""
    largest = max(abs(one) for one in expected)
    pairs = zip(found, expected, strict=True)
    differences = [abs(own - theirs) for own, theirs in pairs]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    bound = bound_of(artefact) * max(1.0, largest)
    return RewardComparison(len(found), largest, worst, bound)
