"""The models beside the policy that a stage declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..batch import OutputSpec
from ..schema.locations import ModelPath


@dataclass(frozen=True)
class AuxiliaryModel:
    """A frozen model beside the policy. One that computes ahead, before the first step, is freed
    then. One of the windows stays: ``prepare`` can compute with it, and the outputs of the policy
    may be divergences from it."""

    spec: OutputSpec
    model: ModelPath | None = None  # None: the policy as it was before the first step
    when: Literal["ahead", "window"] = "ahead"
