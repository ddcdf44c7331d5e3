"""The auxiliary models of a run as they are opened, if they have the policy's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...data.text.codec import Codec
from ...errors import ModelError, RecipeError
from ...model.pretrained.loading import resolve
from ...model.section import ModelSection
from ...network.heads import has_head
from ...network.network import Network
from ...network.open import open_network
from ...parallel.world import World
from ...recipe.recipe import Recipe
from ...recipe.recipe_data import open_codec
from ...training.auxiliary_model import AuxiliaryModel
from ...training.precompute import model_of
from ..policy import options_of


def open_auxiliary(
    recipe: Recipe,
    role: str,
    codec: Codec,
    world: World,
    longest: int = 0,
    folder: Path | None = None,
) -> Network:
    """The frozen model of a role, from its ``folder`` if that is known, for documents of up to
    ``longest`` tokens. Raises ``RecipeError`` if its tokens are not the policy's."""
    model = model_of(recipe.stage.auxiliary[role], recipe.model)
    base = folder or resolve(model)
    tokenizer = open_codec(replace(recipe, model=model), base).tokenizer
    refuse_other_tokens(recipe, role, tokenizer, codec)
    options = options_of(recipe, longest=longest)
    heads = heads_of(recipe.stage.auxiliary[role], model, base)
    options = replace(options, method=None, heads=heads, is_trainable=False)
    return open_network(base, model, tokenizer, world, options)


def heads_of(auxiliary: AuxiliaryModel, model: ModelSection, base: Path) -> Sequence[str]:
    """The heads of an auxiliary model. Raises ``ModelError`` if it is to give rewards, and has no
    head for them."""
    if not auxiliary.spec.is_reward:
        return ()
    folders = [base] if model.adapter is None else [model.adapter, base]
    if not any(has_head(folder, "values") for folder in folders):
        raise ModelError(f"{model.adapter or base}: not a reward model; train one with stage: rm")
    return ("values",)


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
