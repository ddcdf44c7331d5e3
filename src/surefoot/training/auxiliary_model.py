"""The models beside the policy that a stage declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..batch import OutputSpec
from ..schema.locations import ModelPath


@dataclass(frozen=True)
class AuxiliaryModel:
    """A frozen model beside the policy. One that computes ahead, before the first step, is freed
    then; one of the windows is there whenever ``prepare`` asks it."""

    spec: OutputSpec
    model: ModelPath | None = None  # None: the policy as it was before the first step
    when: Literal["ahead", "window"] = "ahead"
