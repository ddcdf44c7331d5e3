"""``args``, the first argument of every event: the parts of a run, and its settings under the names
of the Hugging Face Trainer's arguments. They are shown; only names that are new can be set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RecipeError
from .section import TrainSection
from .views import DataView, ScheduleView, Shown

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from .step import Learner


@dataclass
class Arguments:
    """The names of the Hugging Face Trainer's arguments, to be read; a name that is new can be set,
    and is part of every checkpoint."""

    shown: Mapping[str, Shown] = field(default_factory=dict, repr=False, kw_only=True)
    added: dict[str, Any] = field(default_factory=dict, kw_only=True)  # what was set

    def __getattr__(self, name: str) -> Any:
        """An argument of the Trainer, or what was set: only for names that are no member."""
        members = self.__dict__
        if name in members.get("shown", ()):
            return members["shown"][name].value
        if name in members.get("added", ()):
            return members["added"][name]
        raise AttributeError(f"args has no {name!r}; set it as args.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in type(self).__dataclass_fields__ and name not in self.__dict__:
            object.__setattr__(self, name, value)  # while it is made
            return
        if name in self.shown and (setting := self.shown[name].setting) is not None:
            raise RecipeError(f"args.{name}: it only shows a setting; set {setting} in the recipe")
        if name in self.shown or name in MEMBERS:
            raise RecipeError(f"args.{name}: it is a part of the run; choose another name")
        try:
            is_plain = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            raise RecipeError(
                f"args.{name}: a {type(value).__name__} cannot be part of a checkpoint; set finite "
                "numbers, text, lists, or mappings of text to these"
            )
        self.added[name] = value

    def to_dict(self) -> dict[str, object]:
        """The Trainer's arguments, and what was set."""
        return self.added | {name: each.value for name, each in self.shown.items()}

    def to_json_string(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


@dataclass
class Context(Arguments):
    """The parts of a run that callbacks may read."""

    section: TrainSection
    model: nn.Module
    learner: Learner  # of the policy
    output_dir: Path
    num_examples: int | None  # None: not known as long as the data is being encoded
    steps_per_epoch: int | None

    processing_class: PreTrainedTokenizerBase | None = None  # the tokenizer, with the template
    train_dataloader: DataView | None = None
    eval_dataloader: DataView | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The current optimizer of the policy."""
        return self.learner.step.optimizer

    @property
    def lr_scheduler(self) -> ScheduleView:
        """The learning rates of the policy."""
        return ScheduleView(self.optimizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The former name of ``processing_class``."""
        return self.processing_class


MEMBERS = frozenset({*dir(Context), *(each.name for each in fields(Context))})
