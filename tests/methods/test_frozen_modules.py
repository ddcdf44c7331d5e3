"""Full tuning that leaves some modules as they are: experts, routers, embeddings."""

import pytest
import torch

import mixtures
import tiny
from surefoot.errors import RecipeError
from surefoot.methods import Full

KINDS = {  # of each mixture: words in the names of its experts' and its routers' parameters
    "mixtral": (".experts.", ".gate."),
    "qwen3_moe": (".experts.", ".gate."),
    "gpt_oss": (".experts.", ".router."),
    "deepseek_v3": (".experts.", ".gate."),
    "jetmoe": (("experts.", "_linear."), ".router."),
    "granitemoe": (".experts.", ".router."),
}


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_routers_are_frozen_whatever_their_names(kind):
    experts, routers = KINDS[kind]
    names = {name for name, _ in mixtures.model(kind).named_parameters()}
    words = (experts,) if isinstance(experts, str) else experts
    expected = {n for n in names if any(word in n for word in words) and routers not in n}
    assert expected
    assert frozen(Full(frozen_modules=("experts",)).apply(mixtures.model(kind))) == expected
    expected = {n for n in names if routers in n}
    assert expected
    assert frozen(Full(frozen_modules=("routers",)).apply(mixtures.model(kind))) == expected


def test_modules_are_frozen_by_name_and_the_others_are_trained():
    model = Full(frozen_modules=("embed_tokens", "k_proj")).apply(tiny.model())
    names = {name for name, _ in model.named_parameters()}
    assert frozen(model) == {n for n in names if "embed_tokens" in n or "k_proj" in n}
    tied = Full(frozen_modules=("embed_tokens",)).apply(tiny.model("qwen2"))
    assert not tied.lm_head.weight.requires_grad


@pytest.mark.parametrize("name", ["experts", "routers", "mpl"])
def test_a_module_that_is_not_there_is_named_with_those_that_are(name):
    with pytest.raises(RecipeError, match=f"frozen_modules: the model has no '{name}'; .*lm_head"):
        Full(frozen_modules=(name,)).apply(tiny.model())


def test_nothing_left_to_train_is_refused():
    with pytest.raises(RecipeError, match="frozen_modules: nothing would be trainable"):
        Full(frozen_modules=("model", "lm_head")).apply(tiny.model())
    assert torch.is_grad_enabled()
