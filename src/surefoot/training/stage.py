"""What a stage owes the loop: how examples become tokens and batches, and how a batch becomes a
loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from ..batch import Batch, Features, Loss, Outputs, Window
from ..data.encoded import Encoded
from ..data.example import Example

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..data.text.codec import Codec


@dataclass(frozen=True)
class Models:
    """The networks by role. Only the policy learns."""

    policy: nn.Module
    others: Mapping[str, nn.Module] = field(default_factory=dict)

    def __getitem__(self, role: str) -> nn.Module:
        return self.policy if role == "policy" else self.others[role]


class Stage(Protocol):
    """One training objective. Its fields are its settings in the recipe."""

    roles: ClassVar[tuple[str, ...]]  # the models it needs; "policy" is the one that learns
    needs: ClassVar[tuple[str, ...]]  # the fields of Outputs that its loss reads
    uses_template: ClassVar[bool]  # whether its examples are conversations

    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Turn examples into token lists: one entry per example, its features or why it was
        dropped. The same whatever its settings are."""

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Turn token lists into one micro-batch."""

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """What to minimise on one micro-batch. Pure: no model is called here, so any engine can run
        it."""


@runtime_checkable
class SmoothingStage(Stage, Protocol):
    """A stage that learns labels which may be smoothed."""

    @property
    def label_smoothing_factor(self) -> float:
        """How much of each label is spread evenly over the vocabulary."""


def smoothing(stage: Stage) -> float:
    """How much of each label ``stage`` spreads evenly over the vocabulary."""
    return stage.label_smoothing_factor if isinstance(stage, SmoothingStage) else 0.0


def is_likelihood(stage: Stage) -> bool:
    """Whether its loss is the likelihood of all labels, so that they have a perplexity, and it is
    well to predict them (which it is not for answers to be rejected)."""
    return "total" in stage.needs


def measured(stage: Stage) -> tuple[str, ...]:
    """The fields of Outputs that an evaluation reads."""
    return (*stage.needs, "predictions") if is_likelihood(stage) else stage.needs


@runtime_checkable
class ComparingStage(Stage, Protocol):
    """A stage that may learn from what a reference, the policy before the first step or another
    model, says about each example. That is asked once; then features have it as ``reference``."""

    @property
    def reference(self) -> str | None:
        """The path of another model."""

    @property
    def compares(self) -> bool:
        """Whether it does."""

    def answers(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """[examples, 2] What is kept of the reference's outputs."""


def comparing(stage: Stage) -> ComparingStage | None:
    """``stage``, if it needs a reference."""
    return stage if isinstance(stage, ComparingStage) and stage.compares else None


def as_if_asked(stage: Stage, features: Sequence[Features]) -> Sequence[Features]:
    """``features`` for a loss of which only the size matters: the reference says 0 of each."""
    if comparing(stage) is None:
        return features
    return [{**item, "reference": (0, 0)} for item in features]


@runtime_checkable
class PreparingStage(Stage, Protocol):
    """A stage that first asks its models something: samples, values, rewards."""

    def prepare(self, models: Models, window: Window) -> Iterable[Window]:
        """Turn what was loaded into what to learn from; every window yielded is one optimizer
        step."""


def learnables(stage: Stage, models: Models, window: Window) -> Iterable[Window]:
    """The windows to learn from, one per optimizer step: what ``stage`` prepares, or ``window``."""
    return stage.prepare(models, window) if isinstance(stage, PreparingStage) else (window,)
