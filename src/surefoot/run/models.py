"""The models that a run stands on: found as when it began, and refused if they have changed.

These are the base of an adapter, and the models of auxiliary roles such as a reference. Of a model
whose weights are in every checkpoint only the configuration counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from ..data.text.codec import Codec
from ..errors import ModelError, RecipeError
from ..model import base_identity
from ..model.base_identity import BaseModel, Record, changed, identify, pinned, some
from ..model.config import read_config
from ..model.loading import resolve
from ..model.outputs import no_distribution
from ..model.section import ModelSection
from ..network.draft import NetworkOptions
from ..network.heads import has_head
from ..network.network import Network
from ..network.open import open_network
from ..parallel.sharded_model import keep_ends_gathered
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import open_codec
from ..training.precompute import model_of
from ..training.rewards import AuxiliaryModel
from ..training.stage import POLICY, auxiliary_models
from ..training.step import InitialValues
from .policy import check_early, frozen_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModels:
    """The models of a run by role, and what the checkpoint it resumes from says of them."""

    recipe: Recipe
    models: Mapping[str, BaseModel]
    recorded: Record
    checkpoint: Path | None

    @property
    def policy(self) -> BaseModel:
        """The model of the recipe."""
        return self.models[POLICY]

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each model."""
        return {role: base.folder for role, base in self.models.items()}

    def record(self) -> dict[str, bytes]:
        """The file that records the models. Raises ``ModelError`` if one is not what the
        checkpoint was trained with."""
        # Refused, not warned of: nobody reads the warning, and the run is a mixture of two bases.
        now = identify(self.models, self.recorded)
        for role, base in now.items():
            if role in self.recorded and (names := changed(self.recorded[role], base)):
                raise ModelError(self._refusal(role, base.path, names))
        self._compare_adapter(now)
        made = self.policy.folder / base_identity.NEW_WEIGHTS
        more = {made.name: made.read_bytes()} if made.is_file() else {}
        return {base_identity.NAME: base_identity.dump(now), **more}

    def _refusal(self, role: str, path: str, names: list[str]) -> str:
        assert self.checkpoint is not None
        before, step = self.recorded[role].path, self.checkpoint.name
        setting = "model.path" if role == POLICY else f"the {role}"
        key = "model.path" if self.recipe.method.saves_base_model else "model.adapter"
        other = f"or start a new run from its weights ({key}={self.checkpoint})"
        if path != before:
            return (
                f"{setting}: {path} is another model than that of {step}, {before}, with other "
                f"files ({some(names)}); name that one, {other}"
            )
        return (
            f"{setting}: {before} has changed since {step} was saved ({some(names)}), and this "
            f"run was trained with the former files; restore them, {other}"
        )

    def _compare_adapter(self, now: Record) -> None:
        """Warn if the run starts from an adapter that was trained on another base."""
        adapter = self.policy.adapter
        if adapter is None or self.checkpoint is not None:
            return
        if (before := base_identity.read(adapter).get(POLICY)) is None:
            return
        if names := [n for n in changed(before, now[POLICY]) if n in before.files]:
            logger.warning(
                "model.adapter: %s was trained on other files of its base than those in %s (%s)",
                adapter,
                self.policy.folder,
                some(names),
            )


def find_bases(recipe: Recipe, checkpoint: Path | None) -> BaseModels:
    """The models of ``recipe``; those of a hub at the commit with which the run of ``checkpoint``
    began. Raises ``ModelError`` if one does not exist."""
    recorded = {} if checkpoint is None else base_identity.read(checkpoint)
    # A branch that has moved on the hub is no reason to refuse: the commit of the run still exists
    # there (docs/decisions/0043).
    section = pinned(recipe.model, recorded.get(POLICY))
    if section != recipe.model:
        logger.info("model.path: %s at the commit of the run, %s", section.path, section.revision)
    auxiliaries = recipe.stage.auxiliary
    is_start_needed = any(auxiliary.model is None for auxiliary in auxiliaries.values())
    has_weights = is_start_needed or not recipe.method.saves_base_model
    folder = resolve(section)
    models = {POLICY: BaseModel(section, folder, has_weights, section.adapter, is_start_needed)}
    for role, auxiliary in auxiliaries.items():
        if auxiliary.model is not None:
            other = pinned(model_of(auxiliary, recipe.model), recorded.get(role))
            models[role] = BaseModel(
                other,
                _resolved(other, role),
                adapter=other.adapter,
                has_adapter_weights=other.adapter is not None,
            )
    return BaseModels(recipe, models, recorded, checkpoint)


def _resolved(section: ModelSection, role: str) -> Path:
    """The folder of an auxiliary model. Raises ``ModelError``, which names the role."""
    try:
        return resolve(section)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path:", f"the {role}:", 1)) from None


NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})


def check_models(recipe: Recipe, world: World, codec: Codec) -> None:
    """Raise what is known to be wrong with the models before the data is encoded, which may take
    hours. A collective call."""
    world.on_main(partial(check_early, recipe, world, codec))
    world.on_main(partial(check_tokens, recipe, codec))


def open_auxiliary(
    recipe: Recipe,
    role: str,
    codec: Codec,
    world: World,
    longest: int = 0,
    folders: Mapping[str, Path] = NO_FOLDERS,
) -> Network:
    """The frozen model of a role, from its folder if that is known, for documents of up to
    ``longest`` tokens. Raises ``RecipeError`` if its tokens are not the policy's."""
    base, model, options = parts_of(recipe, role, folders, longest)
    tokenizer = open_codec(replace(recipe, model=model), base).tokenizer
    refuse_other_tokens(recipe, role, tokenizer, codec)
    return open_network(base, model, tokenizer, world, options)


def parts_of(
    recipe: Recipe, role: str, folders: Mapping[str, Path] = NO_FOLDERS, longest: int = 0
) -> tuple[Path, ModelSection, NetworkOptions]:
    """The folder of the model of a role, its section, and the options it is opened with."""
    auxiliary = recipe.stage.auxiliary[role]
    model = model_of(auxiliary, recipe.model)
    base = folders.get(POLICY if auxiliary.model is None else role) or resolve(model)
    options = frozen_options(recipe, longest=longest)
    return base, model, replace(options, heads=heads_of(auxiliary, model, base))


def heads_of(auxiliary: AuxiliaryModel, model: ModelSection, base: Path) -> Sequence[str]:
    """The heads of an auxiliary model. Raises ``ModelError`` if it is to give rewards, and has no
    head for them."""
    if not auxiliary.spec.is_reward:
        return ()
    folders = [base] if model.adapter is None else [model.adapter, base]
    if not any(has_head(folder, "values") for folder in folders):
        raise ModelError(f"{model.adapter or base}: not a reward model; train one with stage: rm")
    return ("values",)


def open_networks(
    recipe: Recipe, policy: Network, opened: Callable[[str], Network]
) -> dict[str, Network]:
    """The policy and the models that stay beside it, by role; the policy's outputs may be
    divergences from these. One that is the base under its adapter is no second model, and none that
    only prepares windows is if it is the policy before the first step; any other is ``opened``."""
    others: dict[str, Network] = {}
    for role, auxiliary in auxiliary_models(recipe.stage, "window").items():
        if is_base_of_policy(recipe, role) and not _trains_head(policy):
            others[role] = policy.without_adapter()
            logger.info("%s: the base under the adapter, without a second model", role)
        elif auxiliary.model is None and not is_compared(recipe, role):
            # Not a second network, nor the adapter switched off, which is wrong for one that goes
            # on or that changes the base: the first values of what is trained, on the host, change
            # places with the current ones. They are copied, so they are exact
            # (docs/decisions/0052).
            others[role] = replace(policy, around=InitialValues(policy).in_place)
        else:
            others[role] = opened(role)
            others[role].module.eval()
            if is_compared(recipe, role):  # its head computes in the backward pass, too
                keep_ends_gathered(others[role].module)
    if recipe.stage.spec.divergence is not None:
        refuse_unknown_distributions([policy, *others.values()])
    return {POLICY: policy.compared_with(others) if others else policy, **others}


def refuse_unknown_distributions(networks: Sequence[Network]) -> None:
    """Raise ``ModelError`` if the distributions of one cannot be computed in chunks."""
    for network in networks:
        if network.engine.runner.head is None:
            raise no_distribution(network.module)


def is_compared(recipe: Recipe, role: str) -> bool:
    """Whether outputs of the policy are divergences from the model of a role."""
    divergence = recipe.stage.spec.divergence
    return divergence is not None and divergence.role == role


def needs_start(recipe: Recipe) -> bool:
    """Whether windows are prepared with the policy as it was before the first step."""
    models = auxiliary_models(recipe.stage, "window").items()
    return any(each.model is None and not is_compared(recipe, role) for role, each in models)


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
    for role, auxiliary in recipe.stage.auxiliary.items():
        if auxiliary.model is None:
            continue
        base, model, _ = parts_of(recipe, role)
        tokenizer = open_codec(replace(recipe, model=model), base).tokenizer
        refuse_other_tokens(recipe, role, tokenizer, codec)
        size = read_config(base, model).get_text_config().vocab_size
        if is_compared(recipe, role) and size < len(tokenizer):
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
