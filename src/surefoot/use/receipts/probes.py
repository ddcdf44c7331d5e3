"""Fixed conversations, and what a checkpoint and its artefact compute of them: the loss and the
most probable tokens of a model that writes text, the rewards of a reward model; with a bound."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ...batch import SCORES
from ...data.example import Example, Message
from ...data.text.collation import collate
from ...data.text.ranking import up_to_last_label
from ...errors import ModelError, TemplateError
from ...generate.generation import context_length
from ...model.loading import device
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
RESPONSES = ("Paris is on the Seine; the sum is 42.", "I do not know.")

EXACT = 1e-3  # other orders of summation in float32
BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(("float32", "f32"), EXACT),
    **dict.fromkeys(("bfloat16", "float16", "bf16", "f16"), 0.02),
    **dict.fromkeys(("q8_0", "w8a8", "fp8", "fp8-block", "q6_k"), 0.1),
    **dict.fromkeys(("q5_k_m", "q5_k_s", "q5_0"), 0.2),
    **dict.fromkeys(("q4_k_m", "q4_k_s", "q4_0", "w4a16"), 0.5),
}
"""Nats per token by which the loss may differ, and by which the artefact's most probable tokens may
be less probable than the checkpoint's. Chosen here, with room over what small models show."""

Probe = Sequence[int]  # the token ids of a conversation, up to its end token


def probes_of(opened: LoadedModel) -> Sequence[Probe]:
    """The conversations that fit the model's positions; plain text for a model that writes text
    without a template for them. Raises ``ModelError`` if there are none."""
    limit = context_length(opened.model) or sys.maxsize
    codec = opened.codec.with_section(replace(opened.codec.section, cutoff_len=limit))
    pairs = [(prompt, response) for prompt in PROMPTS for response in RESPONSES]
    chats = [
        Example((Message("user", prompt), Message("assistant", response)), origin="a probe")
        for prompt, response in pairs
    ]
    try:
        if opened.template is None and not opened.is_reward_model:
            raise TemplateError("it has no template")
        outcomes = [one for one in codec.encode_chats(chats) if isinstance(one, list | tuple)]
        found = [[int(i) for i in up_to_last_label(one[-1])["input_ids"]] for one in outcomes]
    except TemplateError as error:
        if opened.is_reward_model:
            raise ModelError(f"{opened.folder}: no rewards can be compared: {error}") from None
        texts = [opened.continuation(" ".join(pair)) for pair in pairs]
        found = [ids for ids in texts if len(ids) <= limit]
    if not found:
        raise ModelError(f"{opened.folder}: no probe fits its context length of {limit}")
    return found


@torch.no_grad()
def logps_of(model: Any, probes: Sequence[Probe]) -> list[torch.Tensor]:
    """[T, V] Of each probe: what a transformers model says of every next token."""
    rows = model.get_input_embeddings().weight.shape[0]
    if (largest := max(i for ids in probes for i in ids)) >= rows:
        raise ModelError(f"it has embeddings of {rows} tokens, but the probes have token {largest}")
    place = next(model.parameters()).device
    given = [torch.tensor([ids], device=place) for ids in probes]
    return [F.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1).cpu() for ids in given]


@dataclass(frozen=True)
class TextComparison:
    """What an artefact and its checkpoint say of the next tokens."""

    loss: float
    checkpoint_loss: float
    equal_tokens: int
    compared_tokens: int
    regret: float
    """Nats per token by which the checkpoint finds the artefact's most probable tokens less
    probable than its own: 0 where they are equal, and nearly so where it is undecided."""
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
            f"{self.equal_tokens} of {self.compared_tokens} most probable tokens are equal, the "
            f"others cost {self.regret:.4f} nats per token (bound of both {self.bound:g})"
        )


def compare_texts(
    artefact: Artefact,
    probes: Sequence[Probe],
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> TextComparison:
    """The outputs of an artefact beside those of its checkpoint."""
    width = min(found[0].shape[1], expected[0].shape[1])  # a file may have rows without a token
    own, theirs = (torch.cat(list(logps))[:, :width].double() for logps in (found, expected))
    targets = torch.tensor([i for ids in probes for i in ids[1:]])[:, None]
    best, chosen = theirs.argmax(1, keepdim=True), own.argmax(1, keepdim=True)
    return TextComparison(
        -float(own.gather(1, targets).mean()),
        -float(theirs.gather(1, targets).mean()),
        int((best == chosen).sum()),
        len(best),
        float((theirs.gather(1, best) - theirs.gather(1, chosen)).mean()),
        bound_of(artefact),
    )


def rewards_of(opened: LoadedModel, probes: Sequence[Probe]) -> list[float]:
    """Of a checkpoint of a reward model."""
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
def artefact_rewards(model: Any, head: torch.Tensor | None, probes: Sequence[Probe]) -> list[float]:
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


@dataclass(frozen=True)
class RewardComparison:
    """The rewards of an artefact and its checkpoint."""

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


def compare_rewards(
    artefact: Artefact, found: Sequence[float], expected: Sequence[float]
) -> RewardComparison:
    """The rewards of an artefact beside those of its checkpoint."""
    largest = max(map(abs, expected))
    differences = [abs(own - theirs) for own, theirs in zip(found, expected, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    return RewardComparison(len(found), largest, worst, bound_of(artefact) * max(1.0, largest))


def bound_of(artefact: Artefact) -> float:
    """Of its format."""
    return BOUNDS.get(artefact.type, EXACT) if artefact.is_rounded else EXACT
