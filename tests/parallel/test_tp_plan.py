"""What becomes of each module under tensor parallelism, and what is refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.parallel.sharded_model import layers
from surefoot.parallel.tp_plan import LayerRange, module_plans


def styles(model, size):
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(role.module)]: role.style for role in module_plans(model, size)}


def test_transformers_plan_says_what_is_cut():
    found = styles(tiny.model("qwen3", num_hidden_layers=2), 2)
    layer = "model.layers.1"
    assert found["model.embed_tokens"] == "vocabulary"
    assert found["lm_head"] == "columns", "and no process has all logits"
    assert found[f"{layer}.self_attn.q_proj"] == found[f"{layer}.self_attn.k_proj"] == "columns"
    assert found[f"{layer}.self_attn.o_proj"] == found[f"{layer}.mlp.down_proj"] == "rows"
    assert found[f"{layer}.self_attn.q_norm"] == "whole_inside"
    assert found[f"{layer}.input_layernorm"] == found["model.norm"] == "whole"


def test_every_parameter_has_one_role():
    model = LoRA(rank=2).apply(tiny.model("qwen2")).get_base_model()
    owners = [
        role.module for role in module_plans(model, 4) if role.style not in ("groups", "dropout")
    ]
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
    assert found["lm_head.modules_to_save.default"] == "columns"


def test_an_architecture_without_a_plan_is_pointed_to_dp_shard():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(RecipeError, match=r"GPT2LMHeadModel .* no tensor parallel plan .*dp_shard"):
        module_plans(model, 2)


def test_experts_go_whole_to_one_process():
    found = styles(tiny.model("mixtral"), 2)
    assert found["model.layers.0.mlp.experts"] == "experts"
    assert found["model.layers.0.mlp.gate"] == "whole"
    model = tiny.model("qwen3_moe", num_experts=3)
    with pytest.raises(RecipeError, match=r"share the 3 experts .* choose a divisor of 3"):
        module_plans(model, 2)


@pytest.mark.filterwarnings("ignore:The following .*_pattern:RuntimeWarning")  # PEFT's own
def test_experts_that_run_in_their_own_way_are_refused():
    model = tiny.model("mixtral")
    del model.model.layers[0].mlp.experts._is_expert_parallel
    with pytest.raises(RecipeError, match=r"layers.0.mlp.experts runs its experts in .*dp_shard"):
        module_plans(model, 2)
    adapted = LoRA(rank=2).apply(tiny.model("mixtral")).get_base_model()
    with pytest.raises(RecipeError, match=r"the adapter of .*experts covers all experts.*dp_shard"):
        module_plans(adapted, 2)


def test_experts_see_all_tokens():
    found = along(tiny.model("mixtral"))
    block = "model.layers.0.mlp"
    assert (block, "block_of_experts") in found
    assert not found[f"{block}.experts", "experts"]
    assert not found[f"{block}.gate", "whole"]
    assert found["model.layers.0.input_layernorm", "whole"]


def test_a_convolution_in_a_layer_is_refused():
    model = tiny.model()
    model.model.layers[0].linear_attn = torch.nn.Conv1d(4, 4, 2)
    with pytest.raises(RecipeError, match=r"convolution model.layers.0.linear_attn.*dp_shard"):
        module_plans(model, 2)


def test_heads_that_cannot_be_shared_are_named():
    with pytest.raises(RecipeError, match=r"the 4 attention heads .* choose a divisor of 4"):
        module_plans(tiny.model(), 3)
    model = tiny.model(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(RecipeError, match=r"3 key-value heads .* a divisor or a multiple of 3"):
        module_plans(model, 2)


def test_dora_is_refused():
    model = LoRA(rank=2, dora=True).apply(tiny.model()).get_base_model()
    with pytest.raises(RecipeError, match="lora_magnitude_vector"):
        module_plans(model, 2)


def test_a_norm_inside_that_the_plan_forgets_is_refused():
    model = tiny.model()
    model.model.layers[0].self_attn.q_norm = torch.nn.LayerNorm(8)
    with pytest.raises(RecipeError, match=r"does not mention model.layers.0.self_attn.q_norm"):
        module_plans(model, 2)


def along(model, size=2, stretches=None):
    """The roles of modules that tokens are cut for: name, style, whether on parts."""
    names = {id(module): name for name, module in model.named_modules()}
    found = module_plans(model, size, stretches or [LayerRange(layers(model))])
    return {(names[id(role.module)], role.style): role.on_parts for role in found}


def test_of_stages_the_first_divides_the_tokens_and_the_last_puts_them_together():
    model = tiny.model("qwen3")
    one, two, three = layers(model)
    stages = [LayerRange([one, two], is_last=False), LayerRange([three], is_first=False)]
    styles = ("first_layer", "entered_layer", "last_layer")
    assert [place for place in along(model, stretches=stages) if place[1] in styles] == [
        ("model.layers.0", "first_layer"),
        ("model.layers.2", "entered_layer"),
        ("model.layers.2", "last_layer"),
    ]


def test_tokens_are_divided_between_blocks():
    found = along(tiny.model("qwen3"))
    layer = "model.layers.1"
    assert ("model.layers.0", "first_layer") in found
    assert ("model.layers.2", "last_layer") in found
    assert found[f"{layer}.self_attn", "block"]
    assert found[f"{layer}.mlp", "block"]
    assert found[f"{layer}.input_layernorm", "whole"], "sees a part of the tokens"
    assert found[f"{layer}.self_attn.q_proj", "columns"]
    assert found[f"{layer}.mlp.down_proj", "rows"]
    outside = ("model.norm", "whole"), ("lm_head", "columns"), ("model.embed_tokens", "vocabulary")
    assert not any(found[place] for place in outside)


def test_attention_that_all_do_whole_leaves_parts_at_its_end_only():
    found = along(tiny.model("phi3"))
    attention = "model.layers.1.self_attn"
    assert not found[attention, "block"]
    assert not found[f"{attention}.qkv_proj", "columns_gathered"]
    assert found[f"{attention}.o_proj", "rows_of_whole"]


def test_adapters_have_a_part_of_the_gradient_where_their_matrix_has():
    found = along(LoRA(rank=2, dropout=0.1).apply(tiny.model()).get_base_model())
    attention = "model.layers.1.self_attn"
    assert found[f"{attention}.q_proj.lora_A.default", "whole"]
    assert found[f"{attention}.q_proj.lora_B.default", "columns"]
    assert found[f"{attention}.o_proj.lora_A.default", "rows"]
    assert found[f"{attention}.o_proj.lora_B.default", "whole"]


def test_dropout_between_blocks_is_that_of_a_part():
    found = along(tiny.model("phi3", resid_pdrop=0.1, pad_token_id=0))
    assert ("model.layers.0.resid_attn_dropout", "dropout_of_parts") in found
    assert ("model.layers.0.resid_attn_dropout", "dropout_of_parts") not in along(tiny.model())


def test_what_cannot_be_cut_along_the_sequence_is_refused():
    model = tiny.model()
    model.config.residual_dropout = 0.1
    with pytest.raises(RecipeError, match=r"sequence_parallel: Llama.*residual_dropout"):
        along(model)
    model = tiny.model()
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj.fc": "colwise"}
    model.model.layers[0].mlp.up_proj.fc = torch.nn.Linear(4, 4)
    with pytest.raises(RecipeError, match=r"mlp.up_proj is no block of its own"):
        along(model)
