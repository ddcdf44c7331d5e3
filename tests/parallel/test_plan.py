"""What becomes of each module under tensor parallelism, and what is refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import tiny
from surefoot.errors import RecipeError
from surefoot.methods.lora import LoRA
from surefoot.parallel.plan import roles


def styles(model, size):
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(role.module)]: role.style for role in roles(model, size)}


def test_transformers_plan_says_what_is_cut():
    found = styles(tiny.model("qwen3", num_hidden_layers=2), 2)
    layer = "model.layers.1"
    assert found["model.embed_tokens"] == "vocabulary"
    assert found["lm_head"] == "columns_gathered"
    assert found[f"{layer}.self_attn.q_proj"] == found[f"{layer}.self_attn.k_proj"] == "columns"
    assert found[f"{layer}.self_attn.o_proj"] == found[f"{layer}.mlp.down_proj"] == "rows"
    assert found[f"{layer}.self_attn.q_norm"] == "whole_inside"
    assert found[f"{layer}.input_layernorm"] == found["model.norm"] == "whole"


def test_every_parameter_has_one_role():
    model = LoRA(rank=2).apply(tiny.model("qwen2")).get_base_model()
    owners = [role.module for role in roles(model, 4) if role.style not in ("groups", "dropout")]
    assert len({id(module) for module in owners}) == len(owners)
    assert {p for m in owners for p in m.parameters(recurse=False)} == set(model.parameters())


def test_an_adapter_follows_the_matrix_it_stands_beside():
    method = LoRA(rank=2, dropout=0.1, modules_to_save=("lm_head",))
    found = styles(method.apply(tiny.model()).get_base_model(), 4)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    beside = lambda base, part: found.get(f"{base}.lora_{part}.default")  # noqa: E731
    assert beside(f"{attention}.q_proj", "A") == beside(f"{attention}.k_proj", "A") == "whole"
    assert beside(f"{attention}.q_proj", "B") == "columns"
    assert found[f"{attention}.k_proj.base_layer"] == "some_rows"
    assert beside(f"{attention}.k_proj", "B") == "some_rows"
    assert (beside(f"{mlp}.down_proj", "A"), beside(f"{mlp}.down_proj", "B")) == ("rows", "whole")
    assert found[f"{mlp}.down_proj.lora_dropout.default"] == "dropout"
    assert f"{mlp}.up_proj.lora_dropout.default" not in found
    assert found["lm_head.modules_to_save.default"] == "columns_gathered"


def test_an_architecture_without_a_plan_is_pointed_to_dp_shard():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(RecipeError, match=r"GPT2LMHeadModel .* no tensor parallel plan .*dp_shard"):
        roles(model, 2)


def test_experts_are_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=9, **sizes, **heads))
    with pytest.raises(RecipeError, match=r"expert.*dp_shard"):
        roles(model, 2)


def test_a_convolution_in_a_layer_is_refused():
    model = tiny.model()
    model.model.layers[0].linear_attn = torch.nn.Conv1d(4, 4, 2)
    with pytest.raises(RecipeError, match=r"convolution model.layers.0.linear_attn.*dp_shard"):
        roles(model, 2)


def test_heads_that_cannot_be_shared_are_named():
    with pytest.raises(RecipeError, match=r"the 4 attention heads .* choose a divisor of 4"):
        roles(tiny.model(), 3)
    model = tiny.model(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(RecipeError, match=r"3 key-value heads .* a divisor or a multiple of 3"):
        roles(model, 2)


def test_dora_is_refused():
    model = LoRA(rank=2, dora=True).apply(tiny.model()).get_base_model()
    with pytest.raises(RecipeError, match="lora_magnitude_vector"):
        roles(model, 2)


def test_a_norm_inside_that_the_plan_forgets_is_refused():
    model = tiny.model()
    model.model.layers[0].self_attn.q_norm = torch.nn.LayerNorm(8)
    with pytest.raises(RecipeError, match=r"says nothing of model.layers.0.self_attn.q_norm"):
        roles(model, 2)
