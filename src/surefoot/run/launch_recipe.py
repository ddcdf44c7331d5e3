"""The recipe of a launch, whose steps are computed again, and that of a run which continues another
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import schema
from ..checkpoint.section import CheckpointSection
from ..data.section import DataSection
from ..errors import RunError
from ..parallel.section import ParallelSection
from ..recipe.comparison import changes, compare_with_checkpoint
from ..recipe.recipe import Recipe, dump, load, read
from ..stages import STAGES


@dataclass(frozen=True)
class LaunchRecipe:
    """The recipe of a run as one of its launches had it, for steps that are computed again."""

    recipe: Recipe
    ranks: int | None  # None: not recorded

    @classmethod
    def of(
        cls, run: Path, settings: Mapping[str, Any], ranks: int | None, folder: Path
    ) -> LaunchRecipe:
        """That of ``run`` with the ``settings`` of the launch and on its ``ranks``, if these are
        known, which works in ``folder``. Raises ``RecipeError``, and ``RunError`` if its steps
        cannot be repeated."""
        recipe = read(load(run), settings)
        if recipe.stage.sampler.server is not None:
            raise RunError(
                f"stage.{schema.variant_name(STAGES, recipe.stage)}.sampler: a server has sampled "
                "the responses of this run, and samples other ones each time, so its steps cannot "
                "be computed again"
            )
        train = replace(recipe.train, output_dir=folder)
        layout = recipe.checkpoint.layout_in(recipe.train.output_dir)
        # All that is saved stays, and nothing is a link to a file of the run, which is only read.
        saves = CheckpointSection(keep=None, share_unchanged=False, layout=layout)
        saves = replace(saves, max_shard_size=recipe.checkpoint.max_shard_size)
        return cls(replace(recipe, train=train, checkpoint=saves), ranks)

    @property
    def parallel(self) -> ParallelSection:
        """The mesh of its ranks, as many as it had: a recipe may leave that to the machine."""
        ranks = self.ranks or self.recipe.parallel.num_processes
        return replace(self.recipe.parallel, num_processes=ranks)

    @property
    def datasets(self) -> DataSection:
        """Where its rows are."""
        return self.recipe.data

    @property
    def follows_evaluations(self) -> bool:
        """Whether weights depend on evaluations: these are repeated, too."""
        return self.recipe.optim.follows_evaluations


@dataclass(frozen=True)
class ForkRecipe:
    """The recipe of a run that continues another one."""

    before: bytes  # that of the other run
    text: bytes
    changes: list[str]

    @classmethod
    def of(cls, run: Path, step: int, new: Path, overrides: Sequence[str]) -> ForkRecipe:
        """That of the run in ``new``, which continues ``run`` after ``step`` with ``overrides``.
        Raises ``RecipeError``, and ``RunError`` for a setting by which its state means something.
        """
        before, now = (_placed(run, given, new) for given in ((), overrides))
        weights = "model.path" if now.method.saves_base_model else "model.adapter"
        compare_with_checkpoint(run / f"checkpoint-{step}", before, now, new, weights)
        found = [str(change) for change in changes(before, now)]
        return cls(dump(before).encode(), dump(now).encode(), found)


def _placed(run: Path, overrides: Sequence[str], folder: Path) -> Recipe:
    """The recipe of ``run`` with ``overrides`` for a run in ``folder``, which resumes from the
    latest of its checkpoints."""
    recipe = load(run, overrides)
    train = replace(recipe.train, output_dir=folder)
    saves = replace(recipe.checkpoint, resume="auto")
    return replace(recipe, train=train, checkpoint=saves)
