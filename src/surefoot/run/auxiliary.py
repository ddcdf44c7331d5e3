"""Auxiliary models before the first step: which models compute which columns, and when they are
in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..batch import Batch, Features
from ..data.order.loader import Loader
from ..data.prepared.streaming_data import TrainingData
from ..data.store.cache import default_folder
from ..data.store.dataset import EncodedDataset
from ..data.text.codec import Codec
from ..model.precision import choose
from ..model.pretrained.loading import resolve
from ..model.section import ModelSection
from ..network.network import Network
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..training.context import BlankContext, NetworkContext
from ..training.evaluation import EvaluationSet, windows_of
from ..training.precompute import (
    NOTHING,
    KeptWindows,
    Precomputation,
    WindowSet,
    identity_of,
    model_of,
    precomputation,
    with_items,
    with_windows,
)
from ..training.stage import POLICY
from ..training.windows import windows_of_run
from . import data_loading
from .auxiliary_models import open_auxiliary


@dataclass(frozen=True)
class Ahead:
    """The columns that are computed before the first step, and the models that compute them."""

    recipe: Recipe
    codec: Codec
    world: World
    found: Precomputation
    loaded: TrainingData
    train: WindowSet | None  # None: nothing is computed
    held_out: Mapping[str, WindowSet]

    @property
    def data(self) -> TrainingData:
        """The datasets, with the columns that are cached by item."""
        if self.train is None:
            return self.loaded
        return self.loaded.changed(partial(with_items, found=self.found))

    @property
    def kept(self) -> KeptWindows:
        """The columns of training's windows that are cached by window."""
        return NOTHING if self.train is None else with_windows(self.train, self.found)

    @property
    def evals(self) -> dict[str, EvaluationSet]:
        """The evaluation sets, with all their columns."""
        return {
            name: EvaluationSet(data, with_windows(self.held_out[name], self.found))
            for name, data in self.data.evals.items()
        }

    @property
    def needs_policy(self) -> bool:
        """Whether the initial policy has columns to compute."""
        models = self.recipe.stage.auxiliary.values()
        return not self.found.is_complete and any(one.model is None for one in models)

    def run_without_policy(self) -> None:
        """Compute all columns that other models compute; these models are freed afterwards."""
        if not (self.found.is_complete or self.needs_policy):
            self._run({})

    def run(self, policy: Network) -> None:
        """Compute the rest with the initial policy."""
        self._run({POLICY: policy})

    def blank(self) -> None:
        """Columns of zeros, for measurements of speed."""
        recipe = self.recipe
        self.found.blank(BlankContext(self.codec, recipe.stage, recipe.data.packing))

    def _run(self, policies: Mapping[str, Network]) -> None:
        recipe, networks = self.recipe, dict(policies)
        if not self.found.is_complete:
            for role, one in recipe.stage.auxiliary.items():
                networks[role] = (
                    networks[POLICY]
                    if one.model is None
                    else open_auxiliary(recipe, role, self.codec, self.world)
                )
        size, packing = recipe.train.micro_batch_size, recipe.data.packing
        self.found.run(
            NetworkContext(
                self.codec, recipe.stage, networks, size, packing, self.world, recipe.train.seed
            )
        )


def open_ahead(recipe: Recipe, base: Path, codec: Codec, data: TrainingData, world: World) -> Ahead:
    """The known columns of a run; ``base`` is the folder of the recipe's model."""
    size = recipe.train.global_batch_size
    held_out = {name: eval_set(dataset, size) for name, dataset in data.evals.items()}
    train = None
    loader = data_loading.build_loader(recipe, data, _no_batch, world)
    if recipe.stage.auxiliary and loader.order.is_complete:
        train = _train_set(recipe, data, loader)
    sets = [*([] if train is None else [train]), *held_out.values()]
    return Ahead(recipe, codec, world, columns_of(recipe, base, sets, world), data, train, held_out)


def columns_of(
    recipe: Recipe, base: Path, sets: Sequence[WindowSet], world: World
) -> Precomputation:
    """The known columns of ``sets``, and what is to be computed."""
    stage = recipe.stage
    models = {role: model_of(one, recipe.model) for role, one in stage.auxiliary.items()}
    bases = {role: _base(model, recipe, base) for role, model in models.items()}
    more = choose(recipe.train.precision), recipe.data.packing
    identity = identity_of(stage, {role: (models[role], bases[role]) for role in models}, *more)
    root = recipe.data.cache_dir or default_folder()
    return precomputation(stage, identity, root, sets, world)


def _base(model: ModelSection, recipe: Recipe, base: Path) -> Path:
    return base if model is recipe.model else resolve(model)


def _no_batch(_features: Sequence[Features]) -> Batch:
    raise AssertionError("internal error: only the order of the examples is known here")


def _train_set(recipe: Recipe, data: TrainingData, loader: Loader) -> WindowSet:
    """The training examples, and the windows of the run."""
    order = {n: value for n, value in loader.state_dict().items() if n not in ("epoch", "window")}
    windows = partial(windows_of_run, loader, recipe.train, recipe.stage)
    return WindowSet(data.complete[0], windows, str(sorted(order.items())))


def eval_set(dataset: EncodedDataset, size: int) -> WindowSet:
    """The examples of an evaluation, and its windows of ``size``."""
    windows = partial(windows_of, len(dataset), size)
    return WindowSet(dataset, windows, f"{dataset.fingerprint} in order, {size}")
