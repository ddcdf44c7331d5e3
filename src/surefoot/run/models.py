"""The models of a run: where each is and how it is opened, then the opened ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from ..data.text.codec import Codec
from ..errors import ModelError, RecipeError
from ..model.loading import resolve
from ..model.outputs import no_distribution
from ..model.section import ModelSection
from ..network.draft import NetworkOptions
from ..network.heads import head_size
from ..network.network import Network
from ..network.open import open_network
from ..parallel.sharded_model import keep_ends_gathered
from ..parallel.world import World
from ..recipe.recipe_data import open_tokenizer
from ..training.precompute import model_of
from ..training.rewards import AuxiliaryModel
from ..training.stage import POLICY, Stage, auxiliary_models
from ..training.step import InitialValues

logger = logging.getLogger(__name__)
NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})


@dataclass(frozen=True)
class ModelParts:
    """A model of a run before it is opened: where it is, and how it is opened."""

    folder: Path
    section: ModelSection
    options: NetworkOptions


@dataclass(frozen=True)
class RunModels:
    """The policy and its auxiliary models, before they are opened."""

    stage: Stage
    policy: ModelParts
    folders: Mapping[str, Path] = field(default_factory=dict)  # of auxiliary models, if known

    def auxiliary(self, role: str) -> ModelParts:
        """The frozen model of a role, which only computes outputs."""
        auxiliary, policy = self.stage.auxiliary[role], self.policy
        section = model_of(auxiliary, policy.section)
        folder = policy.folder if auxiliary.model is None else self.folders.get(role)
        folder = folder or resolve(section)
        heads = heads_of(auxiliary, section, folder)
        options = replace(policy.options, method=None, heads=heads, is_trainable=False)
        return ModelParts(folder, section, options)

    def is_compared(self, role: str) -> bool:
        """Whether outputs of the policy are divergences from the model of a role."""
        divergence = self.stage.spec.divergence
        return divergence is not None and divergence.role == role

    def is_start(self, role: str) -> bool:
        """Whether a role is the policy as it was before the first step, in its own network."""
        return self.stage.auxiliary[role].model is None and not self.is_compared(role)

    def is_base(self, role: str) -> bool:
        """Whether the model of a role is what the policy computes without its adapter."""
        section, method = self.policy.section, self.policy.options.method
        is_bare = section.adapter is None and not section.frozen_adapters
        is_same = model_of(self.stage.auxiliary[role], section) == section
        return is_same and is_bare and method is not None and not method.saves_base_model

    @property
    def needs_start(self) -> bool:
        """Whether windows are prepared with the policy as it was before the first step."""
        return any(map(self.is_start, auxiliary_models(self.stage, "window")))


def heads_of(auxiliary: AuxiliaryModel, model: ModelSection, base: Path) -> Mapping[str, int]:
    """The heads of an auxiliary model. Raises ``ModelError`` if it is to give rewards, and has no
    head for them."""
    if not auxiliary.spec.gives_scores:
        return {}
    folders = [base] if model.adapter is None else [model.adapter, base]
    if 1 not in (head_size(folder, "values") for folder in folders):
        raise ModelError(f"{model.adapter or base}: not a reward model; train one with stage: rm")
    return {"values": 1}


def open_models(
    models: RunModels, roles: Sequence[str], codec: Codec, world: World
) -> dict[str, Network]:
    """The frozen models of ``roles``, of which those of one model share it. Raises ``RecipeError``
    if the tokens of one are not the policy's."""
    opened: dict[str, Network] = {}
    known = {role: models.auxiliary(role) for role in roles}
    for role, parts in known.items():
        if (same := next((each for each in opened if known[each] == parts), None)) is not None:
            opened[role] = opened[same]
            continue
        tokenizer = open_tokenizer(parts.section, parts.folder)
        refuse_other_tokens(models, role, tokenizer, codec)
        opened[role] = open_network(parts.folder, parts.section, tokenizer, world, parts.options)
        opened[role].module.eval()
    return opened


def separate_roles(models: RunModels, policy: Network) -> list[str]:
    """The roles that stay beside ``policy`` with a network of their own. A model that is the base
    under its adapter is no second one, and none that only prepares windows is if it is the policy
    before the first step."""
    roles = auxiliary_models(models.stage, "window")
    return [
        role for role in roles if not (models.is_start(role) or _is_below(models, role, policy))
    ]


def with_auxiliary(
    models: RunModels, policy: Network, separate: Mapping[str, Network]
) -> dict[str, Network]:
    """The policy and the models that stay beside it, by role, of which ``separate`` have a network
    of their own; the policy's outputs may be divergences from these."""
    others: dict[str, Network] = {}
    for role in auxiliary_models(models.stage, "window"):
        if role in separate:
            others[role] = separate[role]
            others[role].module.eval()
            if models.is_compared(role):  # its head computes in the backward pass, too
                keep_ends_gathered(others[role].module)
        elif _is_below(models, role, policy):
            others[role] = policy.without_adapter()
            logger.info("%s: the base under the adapter, without a second model", role)
        else:
            # Not a second network, nor the adapter switched off, which is wrong for one that goes
            # on or that changes the base: the first values of what is trained, on the host, change
            # places with the current ones. They are copied, so they are exact
            # (docs/decisions/0052).
            others[role] = replace(policy, around=InitialValues(policy).in_place)
    if models.stage.spec.divergence is not None:
        refuse_unknown_distributions([policy, *others.values()])
    return {POLICY: policy.compared_with(others) if others else policy, **others}


def _is_below(models: RunModels, role: str, policy: Network) -> bool:
    return models.is_base(role) and not _trains_head(policy)


def refuse_unknown_distributions(networks: Sequence[Network]) -> None:
    """Raise ``ModelError`` if the distributions of one cannot be computed in chunks."""
    for network in networks:
        if network.engine.runner.head is None:
            raise no_distribution(network.module)


def _trains_head(policy: Network) -> bool:
    head = policy.inner.get_output_embeddings()
    return head is not None and any(p.requires_grad for p in head.parameters())


def refuse_other_tokens(
    models: RunModels, role: str, tokenizer: PreTrainedTokenizerBase, codec: Codec
) -> None:
    """Raise ``RecipeError`` unless the tokens of an auxiliary model are those of the policy."""
    if tokenizer.get_vocab() != codec.tokenizer.get_vocab():
        policy = models.policy.section
        model = model_of(models.stage.auxiliary[role], policy)
        raise RecipeError(
            f"the {role} {model.path} has a different tokenizer from {policy.path}, so "
            "their outputs cannot be compared; choose a model with the same tokenizer"
        )
