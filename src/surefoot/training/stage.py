"""What a stage owes the loop: how examples become tokens and batches, and how a batch becomes a
loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from ..batch import Batch, Features, Loss, Outputs, Window
from ..data.encode import Encoded
from ..data.example import Example

if TYPE_CHECKING:
    from torch import nn

    from ..data.chat import Codec


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
        dropped."""

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Turn token lists into one micro-batch."""

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """What to minimise on one micro-batch. Pure: no model is called here, so any engine can run
        it."""


@runtime_checkable
class PreparingStage(Stage, Protocol):
    """A stage that first asks its models something: reference odds, samples, values, rewards."""

    def prepare(self, models: Models, window: Window) -> Iterable[Window]:
        """Turn what was loaded into what to learn from; every window yielded is one optimizer
        step."""


def learnables(stage: Stage, models: Models, window: Window) -> Iterable[Window]:
    """The windows to learn from, one per optimizer step: what ``stage`` prepares, or ``window``."""
    return stage.prepare(models, window) if isinstance(stage, PreparingStage) else (window,)
