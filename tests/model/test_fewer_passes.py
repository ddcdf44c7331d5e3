"""Norms and rotations in fewer passes give what transformers gives, gradients too."""

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import tiny
from surefoot.model.fewer_passes import leave_fewer_passes, rms_norm, rotated, use_fewer_passes
from surefoot.model.load import recompute_activations

IDS = torch.tensor([[5, 9, 11, 7, 8, 3], [4, 6, 21, 30, 31, 2]])


def both(kind, dtype=torch.float32):
    theirs = tiny.model(kind, dtype=dtype).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:  # which starts as ones
                parameter.add_(torch.randn_like(parameter) / 4)
    ours = copy.deepcopy(theirs)
    use_fewer_passes(ours)
    return theirs, ours


def learnt(model):
    logits = model(input_ids=IDS).logits
    logits.sin().sum().backward()
    return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]


def replaced(model):
    return {type(m).__name__ for m in model.modules() if "forward" in vars(m)}


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (2, 3, 2, 7)], ids=str)
def test_a_norm_and_its_gradients_are_those_of_its_definition(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    found = rms_norm(x, weight, 0.1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), (x, weight)),
        torch.autograd.grad(expected.sin().sum(), (x, weight)),
    )


def test_a_rotation_and_its_gradients_are_transformers():
    torch.manual_seed(0)
    query = torch.randn(2, 5, 4, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    key = torch.randn(2, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    expected, found = apply_rotary_pos_emb(query, key, cos, sin), rotated(query, key, cos, sin)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(sum(t.sin().sum() for t in found), (query, key)),
        torch.autograd.grad(sum(t.sin().sum() for t in expected), (query, key)),
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "olmo2", "phi3"])
def test_a_model_computes_the_same_as_exactly_as_before(kind):
    theirs, ours = both(kind)
    exact = copy.deepcopy(theirs).double()
    found = zip(learnt(ours), learnt(theirs), learnt(exact), strict=True)
    for here, before, there in found:
        bound = 4 * (before.double() - there).norm() + 1e-6 * there.norm()
        assert (here.double() - there).norm() <= bound


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"LlamaRMSNorm", "LlamaAttention"}),
        ("qwen3", {"Qwen3RMSNorm", "Qwen3Attention"}),
        ("gemma2", {"Gemma2Attention"}),  # its norm multiplies by 1 + w
    ],
)
def test_only_what_is_the_same_is_replaced(kind, expected):
    _, ours = both(kind)
    assert replaced(ours) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types_go_the_way_they_went(dtype):
    theirs, ours = both("qwen3", dtype)
    assert all(map(torch.equal, learnt(ours), learnt(theirs)))


def test_what_is_frozen_gets_no_gradient_and_changes_nothing():
    theirs, ours = both("llama")
    for model in (theirs, ours):
        model.requires_grad_(False)
        model.model.layers[1].self_attn.q_proj.requires_grad_()
    found, expected = learnt(ours), learnt(theirs)
    assert len(found) == 2
    torch.testing.assert_close(found, expected)


def test_recomputed_layers_give_the_same_bits():
    _, ours = both("qwen2")
    again = copy.deepcopy(ours)
    recompute_activations(again)
    assert all(map(torch.equal, learnt(ours), learnt(again)))


def test_transformers_code_can_be_had_back():
    theirs, ours = both("qwen2")
    leave_fewer_passes(ours)
    assert not replaced(ours)
    assert all(map(torch.equal, learnt(ours), learnt(theirs)))


def test_a_module_that_only_looks_like_a_norm_is_left_alone():
    class CentredRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x - x.mean(-1, keepdim=True))

    model = torch.nn.Sequential(CentredRMSNorm(8), LlamaRMSNorm(8))
    use_fewer_passes(model)
    assert ["forward" in vars(norm) for norm in model] == [False, True]
