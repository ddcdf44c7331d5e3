"""A model is cut between two layers only where nothing but hidden states passes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, OPTConfig

import tiny
from surefoot.errors import RecipeError
from surefoot.model import packed_attention
from surefoot.model.pipeline_stages import architecture_of

SMALL = {**tiny.SIZES, "tie_word_embeddings": False}


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.MORE])
@pytest.mark.parametrize("packing", [False, True])
def test_the_parts_are_found_and_left_as_they_were(kind, packing):
    model = tiny.model(kind)
    if packing:
        packed_attention.switch_to_packed(model)
    before = dict(model.named_modules())
    found = architecture_of(model)
    names = (found.embedding, found.layers, found.norm, found.head)
    assert names == ("embed_tokens", "layers", "norm", "lm_head")
    assert dict(model.named_modules()) == before


def test_a_model_on_meta_is_enough():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.model().config)
    assert architecture_of(model).layers == "layers"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (GPT2Config(**SMALL), "wpe is neither embedding, layer nor norm"),
        (
            GraniteConfig(**SMALL, embedding_multiplier=2.0),
            "layer 0 does not get exactly the input",
        ),
        (OPTConfig(), "its embedding is not"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_that_cannot_be_cut_is_refused_by_name(config, why):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(RecipeError, match=f"parallel.pp: {type(model).__name__} .*{why}"):
        architecture_of(model)


def test_a_layer_that_gets_what_learns_besides_is_refused(monkeypatch):
    model = tiny.model()
    weight = model.model.embed_tokens.weight
    rotary = model.model.rotary_emb
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: (x * weight[0],) * 2)
    with pytest.raises(RecipeError, match="layer 0 gets position_embeddings as well"):
        architecture_of(model)
