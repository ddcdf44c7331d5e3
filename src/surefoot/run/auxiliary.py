"""Auxiliary models: those that compute columns before the first step, and those that stay beside
the policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from ..data.order.loader import Loader
from ..data.prepared.streaming_data import TrainingData
from ..data.store.cache import default_folder
from ..data.store.dataset import EncodedDataset
from ..data.text.codec import Codec
from ..errors import RecipeError
from ..model.pretrained.loading import resolve
from ..model.pretrained.positions import read_config
from ..network.network import Network
from ..network.open import open_network
from ..parallel.sharded_model import keep_ends_gathered
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import open_codec
from ..training.context import BlankContext
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
from ..training.stage import POLICY, auxiliary_models
from ..training.windows import windows_of_run
from . import data_loading
from .contexts import context_of
from .policy import frozen_options, options_of

logger = logging.getLogger(__name__)


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
        models = auxiliary_models(self.recipe.stage, "ahead").values()
        if not self.found.is_complete and all(one.model is not None for one in models):
            self.run(None)

    def run(self, policy: Network | None) -> None:
        """Compute the rest with the initial policy and other models, which are freed afterwards."""
        recipe, codec, world = self.recipe, self.codec, self.world
        networks = {} if policy is None else {POLICY: policy}
        if not self.found.is_complete:
            for role, one in auxiliary_models(recipe.stage, "ahead").items():
                is_policy = one.model is None
                networks[role] = networks[POLICY] if is_policy else self._opened(role)
        self.found.run(context_of(recipe, codec, networks, world, recipe.train.seed))

    def _opened(self, role: str) -> Network:
        longest = data_loading.longest_document(self.recipe, self.loaded)
        return open_auxiliary(self.recipe, role, self.codec, self.world, longest, self.folders)

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
    if auxiliary_models(recipe.stage, "ahead") and loader.order.is_complete:
        train = _train_set(recipe, data, loader)
    sets = [*([] if train is None else [train]), *held_out.values()]
    found = columns_of(recipe, folders, sets, world)
    return Ahead(recipe, folders, codec, world, found, data, train, held_out)


def columns_of(
    recipe: Recipe, folders: Mapping[str, Path], sets: Sequence[WindowSet], world: World
) -> Precomputation:
    """The known columns of ``sets``, and what is to be computed."""
    stage, options = recipe.stage, options_of(recipe)
    ahead = auxiliary_models(stage, "ahead")
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


def open_auxiliary(
    recipe: Recipe,
    role: str,
    codec: Codec,
    world: World,
    longest: int = 0,
    folders: Mapping[str, Path] = MappingProxyType({}),
) -> Network:
    """The frozen model of a role, from its folder if that is known, for documents of up to
    ``longest`` tokens. Raises ``RecipeError`` if its tokens are not the policy's."""
    one = recipe.stage.auxiliary[role]
    model = model_of(one, recipe.model)
    base = folders.get(POLICY if one.model is None else role) or resolve(model)
    tokenizer = open_codec(replace(recipe, model=model), base).tokenizer
    refuse_other_tokens(recipe, role, tokenizer, codec)
    options = frozen_options(recipe, longest=longest)
    return open_network(base, model, tokenizer, world, options)


def open_networks(
    recipe: Recipe, policy: Network, opened: Callable[[str], Network]
) -> dict[str, Network]:
    """The policy and the models that stay beside it, by role; the policy's outputs may be
    divergences from these. One that is the base under its adapter is no second model; any other is
    ``opened``."""
    others: dict[str, Network] = {}
    for role in auxiliary_models(recipe.stage, "window"):
        if is_base_of_policy(recipe, role) and not _trains_head(policy):
            others[role] = policy.without_adapter()
            logger.info("%s: the base under the adapter, without a second model", role)
            continue
        others[role] = opened(role)
        others[role].module.eval()
        keep_ends_gathered(others[role].module)  # the head computes in the backward pass, too
    return {POLICY: policy.compared_with(others) if others else policy, **others}


def is_base_of_policy(recipe: Recipe, role: str) -> bool:
    """Whether the model of a role is what the policy computes without its adapter."""
    section = recipe.model
    is_bare = section.adapter is None and not section.frozen_adapters
    is_same = model_of(recipe.stage.auxiliary[role], section) == section
    return is_same and is_bare and not recipe.method.saves_base_model


def _trains_head(policy: Network) -> bool:
    head = policy.inner.get_output_embeddings()
    return head is not None and any(p.requires_grad for p in head.parameters())


def check_tokens(recipe: Recipe, codec: Codec) -> None:
    """Raise ``RecipeError`` unless all auxiliary models have the tokens of the policy, and those
    that it is compared with have embeddings for all of them. Reads no weights."""
    for role, one in recipe.stage.auxiliary.items():
        if one.model is None:
            continue
        model = model_of(one, recipe.model)
        base = resolve(model)
        tokenizer = open_codec(replace(recipe, model=model), base).tokenizer
        refuse_other_tokens(recipe, role, tokenizer, codec)
        size = read_config(base, model).get_text_config().vocab_size
        if one.when == "window" and size < len(tokenizer):
            raise RecipeError(
                f"the {role} {model.path} has embeddings for {size:,} tokens, and the tokenizer "
                f"has {len(tokenizer):,}, so its distribution is not over all of them; choose a "
                "model that has them all, or leave model.new_special_tokens out"
            )


def refuse_other_tokens(
    recipe: Recipe, role: str, tokenizer: PreTrainedTokenizerBase, codec: Codec
) -> None:
    """Raise ``RecipeError`` unless the tokens of an auxiliary model are those of the policy."""
    if tokenizer.get_vocab() != codec.tokenizer.get_vocab():
        model = model_of(recipe.stage.auxiliary[role], recipe.model)
        raise RecipeError(
            f"the {role} {model.path} has a different tokenizer from {recipe.model.path}, so "
            "their outputs cannot be compared; choose a model with the same tokenizer"
        )
