"""What a program gives to ``surefoot.train`` in place of names in a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...extensions import Extended
from ...methods import METHODS
from ...network.method import Method
from ...optim import OPTIMIZERS
from ...optim.optimizer import Optimizer
from ...recipe.recipe import Recipe
from ...stages import STAGES
from ...training.stage import Stage
from .models import PLACEHOLDER, with_model
from .rows import Rows, with_rows
from .stages import StageParts, register

VARIANTS: Mapping[str, tuple[Extended[type[Any]], type]] = {
    "stage": (STAGES, Stage),
    "method": (METHODS, Method),
    "optim": (OPTIMIZERS, Optimizer),
}
TRAIN, EVAL = "train_dataset", "eval_dataset"  # names of the datasets in the recipe of the run


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects; None: what the recipe names."""

    train_dataset: Rows | None = None
    eval_dataset: Rows | None = None
    model: nn.Module | None = None
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None
    parts: StageParts = field(default_factory=StageParts)

    def overrides(self, others: Mapping[str, object]) -> dict[str, object]:
        """The settings of a recipe with these objects, and ``others``; the classes of variants in
        these become known."""
        for name, (choices, protocol) in VARIANTS.items():
            register(name, others.get(name), choices, protocol)
        found = dict[str, object]()
        if self.model is not None:
            found["model.path"] = PLACEHOLDER
        if self.train_dataset is not None:
            found["data.datasets"] = [TRAIN]
        if self.eval_dataset is not None:
            found["data.eval_datasets"] = [EVAL]
        return found | dict(others)

    def stored(self, recipe: Recipe) -> Recipe:
        """``recipe`` with the objects written into its folder. Raises ``SurefootError`` if they
        cannot be."""
        rows = {TRAIN: self.train_dataset, EVAL: self.eval_dataset}
        given = {name: value for name, value in rows.items() if value is not None}
        if given:
            data = with_rows(recipe.data, given, recipe.train.folder)
            recipe = replace(recipe, data=data)
        if self.model is not None or self.tokenizer is not None:
            recipe = with_model(recipe, self.model, self.tokenizer)
        return recipe
