"""How a recipe reads its data: with which tokenizer and template, and through which cache.

Training and evaluation both come here, so they see the same tokens and hold out the same rows.
"""

from __future__ import annotations

from pathlib import Path

from .data.chat import Codec
from .data.prepare import Prepared, find, prepare
from .data.section import DataSection
from .data.templates import load_template
from .model.tokenizer import load_tokenizer
from .recipe.recipe import Recipe


def codec_of(recipe: Recipe, base: Path) -> Codec:
    """The tokenizer of the model in ``base`` with the recipe's new tokens and chat template.

    Raises:
        ModelError: the tokenizer is missing or damaged.
        TemplateError: the template is unknown, or needs tokens that the tokenizer has not.
    """
    tokenizer = load_tokenizer(
        base,
        trust_remote_code=recipe.model.trust_remote_code,
        new_special_tokens=recipe.model.new_special_tokens,
    )
    uses_template = recipe.stage.uses_template
    template = load_template(recipe.data.template, tokenizer) if uses_template else None
    return Codec(tokenizer, template, recipe.data)


def prepared(recipe: Recipe, codec: Codec, section: DataSection | None = None) -> Prepared:
    """The encoded datasets of a recipe, or of another ``section`` read as it says.

    Raises:
        DataError: something is missing, broken, or gives nothing to learn.
    """
    return prepare(
        section or recipe.data,
        lambda examples: recipe.stage.encode(examples, codec),
        fingerprint=_fingerprint(recipe, codec),
        seed=recipe.train.seed,
    )


def found(recipe: Recipe, codec: Codec, section: DataSection | None = None) -> Prepared | None:
    """The same if all of it is in the cache; nothing is encoded."""
    section = section or recipe.data
    return find(section, fingerprint=_fingerprint(recipe, codec), seed=recipe.train.seed)


def _fingerprint(recipe: Recipe, codec: Codec) -> dict[str, str]:
    return {"codec": codec.fingerprint, "stage": repr(recipe.stage)}
