"""LoRA on fused experts by products of rows: PEFT's results without the updated weights."""

import copy

import pytest
import torch
from peft.tuners.lora import ParamWrapper

import mixtures
from each import some
from surefoot.methods import LoRA
from surefoot.model.layers import compile_layers, recompute_activations
from surefoot.model.lora_layers import enable_fused_lora, forms_experts
from surefoot.parallel.sharded_model import layers

IDS = torch.tensor([[5, 9, 11, 7, 8, 3, 20], [4, 6, 21, 30, 31, 2, 1]])
KINDS = some(
    ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "nemotron_h", "lfm2_moe", "minimax_m2"),
    ["qwen3_moe", "gpt_oss", "nemotron_h"],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of a compiler at a graph break
]


def adapted(kind, dtype, rank=3, **changes):
    """A model with an adapter on its experts whose ``B`` is not 0."""
    model = mixtures.model(kind, **changes).to(dtype)
    wrapped = LoRA(rank=rank, targets=("gate_up_proj", "down_proj")[kind == "nemotron_h" :])
    wrapped = wrapped.apply(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return wrapped


def by_loop(model):
    """PEFT's forward pass over transformers' loop of experts, in float64."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if "_is_expert_parallel" in vars(module):
            module.config._experts_implementation = "eager"
    return exact


def learn(model):
    """The output, and the gradients of the adapter."""
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.sin().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected, bound):
    assert (found[0].double() - expected[0]).abs().max() < bound * expected[0].abs().max()
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name].double() - gradient).abs().max() < bound * gradient.abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_results_and_gradients_are_those_of_updated_weights_in_a_loop(kind, dtype):
    model = adapted(kind, dtype)
    expected = learn(by_loop(model))
    enable_fused_lora(model)
    assert not forms_experts(model)
    norms_in_float32 = dtype == torch.float64  # transformers' norms compute in float32 in any type
    assert_close(learn(model), expected, 1e-6 if norms_in_float32 else 2e-5)


def test_a_layer_of_experts_is_exact_in_float64():
    model = adapted("qwen3_moe", torch.float64)
    torch.manual_seed(1)
    x, weights = torch.randn(9, 32, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    chosen = torch.rand(9, 4).topk(2).indices
    chosen[0] = 3  # of one token both are one expert, and expert 2 may have none
    chosen[chosen == 2] = 1
    for one in (by_loop(model), model):
        enable_fused_lora(model)
        layer = next(m for n, m in one.named_modules() if n.endswith("mlp.experts"))
        assert isinstance(layer, ParamWrapper)
        rows = x.clone().requires_grad_()
        y = layer(rows, chosen, weights)
        learning = [p for p in layer.parameters() if p.requires_grad]
        found = [y, *torch.autograd.grad(y.sin().sum(), [rows, *learning])]
        if one is not model:
            expected = found
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


def test_no_tensor_as_large_as_the_experts_is_kept_for_the_backward_pass():
    model = adapted("qwen3_moe", torch.float32, num_local_experts=16, num_experts=16)
    weights = {p.data_ptr() for p in model.parameters()}
    largest = max(p.numel() for p in model.parameters() if p.ndim == 3)

    def kept():
        sizes = []

        def pack(tensor):
            if tensor.data_ptr() not in weights:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=IDS, use_cache=False)
        return max(sizes)

    assert kept() >= largest, "PEFT keeps the updated weights"
    enable_fused_lora(model)
    assert kept() < largest / 2


def test_recomputed_and_compiled_layers_compute_the_same():
    expected = learn(by_loop(adapted("qwen3_moe", torch.float32)))
    for change in (recompute_activations, lambda m: compile_layers(layers(m), backend="eager")):
        model = adapted("qwen3_moe", torch.float32).train()
        enable_fused_lora(model)
        change(model.get_base_model())
        assert_close(learn(model), expected, 2e-5)


def test_an_adapter_that_is_off_or_merged_is_pefts_own():
    model = adapted("qwen3_moe", torch.float32)
    expected = model(input_ids=IDS).logits
    with model.disable_adapter():
        base = model(input_ids=IDS).logits
    enable_fused_lora(model)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, base)
    model.merge_adapter()
    assert torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-5)
