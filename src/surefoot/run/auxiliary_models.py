"""Frozen models beside the policy, opened for the columns that they compute."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from ..data.text.codec import Codec
from ..errors import RecipeError
from ..model.pretrained.loading import resolve
from ..network.network import Network
from ..network.open import open_network
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import open_codec
from ..training.precompute import model_of
from .policy import options_of


def open_auxiliary(recipe: Recipe, role: str, codec: Codec, world: World) -> Network:
    """The frozen model of a role. Raises ``RecipeError`` if its tokens are not the policy's."""
    model = model_of(recipe.stage.auxiliary[role], recipe.model)
    base = resolve(model)
    tokenizer = open_codec(replace(recipe, model=model), base).tokenizer
    refuse_other_tokens(recipe, role, tokenizer, codec)
    options = replace(options_of(recipe), method=None, heads=(), is_trainable=False)
    return open_network(base, model, tokenizer, world, options)


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
