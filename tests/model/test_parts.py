"""The parts of models that read pictures, as LLaMA-Factory's table of models (0.9.5) has them."""

import pytest

import pictures
import tiny
from surefoot.errors import RecipeError
from surefoot.methods import Full

LANGUAGE = ("model.language_model.", "model.text_model.", "lm_head.")


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_each_part_can_be_frozen(kind):
    for frozen in (["tower"], ["projector"], ["tower", "projector"], ["language"]):
        model = Full(frozen_modules=tuple(frozen)).apply(pictures.model(kind))
        for name, parameter in model.named_parameters():
            part = pictures.part_of(kind, name)
            assert part != "language" or name.startswith(LANGUAGE), name
            assert parameter.requires_grad == (part not in frozen), name


def test_a_model_that_reads_text_has_no_tower():
    with pytest.raises(RecipeError, match="the model has no 'tower'"):
        Full(frozen_modules=("tower",)).apply(tiny.model())
