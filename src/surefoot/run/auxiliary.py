"""Auxiliary models before the first step: which compute which columns, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..data.order.loader import Loader
from ..data.prepared.streaming_data import TrainingData
from ..data.store.cache import default_folder
from ..data.store.dataset import EncodedDataset
from ..data.text.codec import Codec
from ..model.pretrained.loading import resolve
from ..network.network import Network
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..training.context import BlankContext
from ..training.evaluation import EvaluationSet, windows_of
from ..training.initial_values import InitialValues
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
from ..training.stage import POLICY, auxiliary_of
from ..training.windows import windows_of_run
from . import data_loading
from .contexts import context_of
from .networks.auxiliary_networks import open_auxiliary
from .policy import options_of


@dataclass(frozen=True)
class Ahead:
    """The columns that are computed before the first step, and the models that compute them."""

    recipe: Recipe
    folders: Mapping[str, Path]  # of the models that are resolved already, by role
    codec: Codec
    world: World
    found: Precomputation
    loaded: TrainingData
    train: WindowSet | None  # None: nothing is computed
    held_out: Mapping[str, WindowSet]
    others: Mapping[str, Network] = field(default_factory=dict)  # that prepare windows, by role
    first: Mapping[str, InitialValues] = field(default_factory=dict)  # of those of the policy

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

    def run_without_policy(self) -> None:
        """Compute all columns, unless the initial policy computes some."""
        models = auxiliary_of(self.recipe.stage, "ahead").values()
        if not self.found.is_complete and all(one.model is not None for one in models):
            self.run(None)

    def run(self, policy: Network | None) -> None:
        """Compute the rest with the initial policy and other models, which are freed afterwards."""
        recipe, codec, world = self.recipe, self.codec, self.world
        networks = {} if policy is None else {POLICY: policy}
        if not self.found.is_complete:
            for role, one in auxiliary_of(recipe.stage, "ahead").items():
                is_policy = one.model is None
                networks[role] = networks[POLICY] if is_policy else self._opened(role)
        self.found.run(context_of(recipe, codec, networks, world, recipe.train.seed))

    @property
    def needs_start(self) -> bool:
        """Whether a resumed run needs the policy as it was before the first step, too."""
        models = auxiliary_of(self.recipe.stage, "window").values()
        return not self.found.is_complete or any(one.model is None for one in models)

    def with_windows(self, policy: Network) -> Ahead:
        """With the models that windows are prepared with; ``policy`` has its first values."""
        models = auxiliary_of(self.recipe.stage, "window")
        starts = [role for role, one in models.items() if one.model is None]
        first = dict.fromkeys(starts, InitialValues(policy)) if starts else {}
        others = {role: policy if role in first else self._opened(role) for role in models}
        return replace(self, others=others, first=first)

    def _opened(self, role: str) -> Network:
        longest = data_loading.longest_document(self.recipe, self.loaded)
        folder = self.folders.get(role)
        return open_auxiliary(self.recipe, role, self.codec, self.world, longest, folder)

    def blank(self) -> None:
        """Columns of zeros, for measurements of speed."""
        recipe = self.recipe
        self.found.blank(BlankContext(self.codec, recipe.stage, recipe.data.packing))


def open_ahead(
    recipe: Recipe, folders: Mapping[str, Path], codec: Codec, data: TrainingData, world: World
) -> Ahead:
    """The known columns of a run; ``folders`` are those of its models by role, at least that of
    the policy."""
    size = recipe.train.global_batch_size
    held_out = {name: eval_set(dataset, size) for name, dataset in data.evals.items()}
    train = None
    loader = data_loading.build_loader(recipe, data, data_loading.no_batch, world)
    if auxiliary_of(recipe.stage, "ahead") and loader.order.is_complete:
        train = _train_set(recipe, data, loader)
    sets = [*([] if train is None else [train]), *held_out.values()]
    found = columns_of(recipe, folders, sets, world)
    return Ahead(recipe, folders, codec, world, found, data, train, held_out)


def columns_of(
    recipe: Recipe, folders: Mapping[str, Path], sets: Sequence[WindowSet], world: World
) -> Precomputation:
    """The known columns of ``sets``, and what is to be computed."""
    stage, options = recipe.stage, options_of(recipe)
    ahead = auxiliary_of(stage, "ahead")
    models = {role: model_of(one, recipe.model) for role, one in ahead.items()}
    found = {
        role: (model, folders.get(POLICY if model is recipe.model else role) or resolve(model))
        for role, model in models.items()
    }
    identity = identity_of(stage, found, options.precision, options.packing)
    return precomputation(stage, identity, recipe.data.cache_dir or default_folder(), sets, world)


def _train_set(recipe: Recipe, data: TrainingData, loader: Loader) -> WindowSet:
    """The training examples, and the windows of the run."""
    order = {n: value for n, value in loader.state_dict().items() if n not in ("epoch", "window")}
    windows = partial(windows_of_run, loader, recipe.train, recipe.stage)
    return WindowSet(data.complete[0], windows, str(sorted(order.items())))


def eval_set(dataset: EncodedDataset, size: int) -> WindowSet:
    """The examples of an evaluation, and its windows of ``size``."""
    windows = partial(windows_of, len(dataset), size)
    return WindowSet(dataset, windows, f"{dataset.fingerprint} in order, {size}")
