"""What a file of LLaMA-Factory asks of a run beside its recipe: ``do_eval``, ``do_predict`` and the
model in ``output_dir``. The code for it is imported when it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ...extensions import imported
from ...recipe.recipe import RunExtras
from ...recipe.yaml import Document
from ...schema import Problem
from .rules import GivenArguments

if TYPE_CHECKING:
    from ...recipe.recipe import Recipe
    from ...training.callback import TrainerState

_FILES, _METRICS = f"{__package__}.run_files", f"{__package__}.run_metrics"
# What plot_loss draws beside the losses, by the stage
_DRAWN = {"dpo": ("rewards/accuracies",), "kto": ("rewards/chosen",), "ppo": ("reward",)}


@dataclass(frozen=True)
class AfterTraining:
    """An evaluation with the files and metrics of LLaMA-Factory."""

    parts: tuple[str, ...]  # eval, predict
    with_generate: bool  # responses are generated and compared with those of the data
    hides_special: bool  # special tokens are not shown in responses


@dataclass(frozen=True)
class LlamaFactoryExtras(RunExtras):
    """The files of LLaMA-Factory, and its evaluations after training, or instead of it."""

    document: Document
    after: AfterTraining | None
    trains: bool = True
    pictures: tuple[str, ...] = ()  # the metrics that plot_loss draws

    def check(self) -> None:
        """Raises ``RecipeError``: there is nothing to do. ``RunError``: a package is missing."""
        if not self.trains and self.after is None:
            message = "is not set; `surefoot eval` evaluates this stage"
            raise self.document.error([Problem(("do_train",), message)])
        if self.after is not None and self.after.with_generate:
            imported("surefoot.use.run_evaluation:comparison")()

    def callbacks(self, recipe: Recipe) -> Sequence[object]:
        """``trainer_log.jsonl``, which grows while the run trains."""
        path = recipe.train.folder / "trainer_log.jsonl"
        return [imported(f"{_METRICS}:TrainerLog")(path)]

    def finish(self, recipe: Recipe, state: TrainerState) -> None:
        """Put the model into ``output_dir``, or into the local folder of a store, and the metrics
        by LLaMA-Factory's names."""
        imported(f"{_FILES}:place_trained_model")(recipe, state)
        imported(f"{_METRICS}:write_metrics")(recipe, state, self.pictures)

    def after_run(self, recipe: Recipe) -> None:
        """Evaluate what was trained; the ranks of a launcher have left each other."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            self.evaluate(recipe, None)
        elif self.after is not None and os.environ.get("RANK", "0") == "0":
            switches = ", ".join(f"do_{part}" for part in self.after.parts)
            click.echo(f"{switches}: run `surefoot eval` on the same file", err=True)

    def evaluate(self, recipe: Recipe, model: str | None) -> bool:
        """Evaluate with the files of LLaMA-Factory."""
        if self.after is not None:
            imported(f"{_FILES}:evaluate")(recipe, self.after, model)
        return self.after is not None


def pictures_of(arguments: GivenArguments) -> tuple[str, ...]:
    """The metrics that ``plot_loss`` draws."""
    names = ("loss", "eval_loss", *_DRAWN.get(arguments["stage"], ()))
    return names if arguments["plot_loss"] else ()


def after_training(arguments: GivenArguments) -> AfterTraining | None:
    """The evaluation that the arguments ask for, if any; of stage sft alone."""
    evaluates = arguments["do_eval"] and (
        arguments["eval_strategy"] == "no" or not arguments["do_train"]
    )
    switches = {"eval": evaluates, "predict": arguments["do_predict"]}
    parts = tuple(name for name, is_on in switches.items() if is_on)
    if not parts or arguments["stage"] != "sft":
        return None
    return AfterTraining(
        parts, arguments["predict_with_generate"], arguments["skip_special_tokens"]
    )
