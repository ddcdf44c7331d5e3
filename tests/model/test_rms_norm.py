"""RMSNorm in one autograd function has transformers' values and gradients, and keeps less."""

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import tiny
from surefoot.model.layers import compile_layers, recompute_activations
from surefoot.model.rms_norm import fuse_norms, is_fused

SIZE, TOKENS = 64, 1100  # more than are computed at once
KINDS = {
    "llama": "LlamaRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "gpt_oss": "GptOssRMSNorm",
    "qwen3_next": "Qwen3NextRMSNorm",
}
FLOAT, NARROW = torch.float32, torch.bfloat16


def norm(kind, dtype=FLOAT):
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    made = getattr(module, KINDS[kind])(SIZE)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1.5, 2, SIZE))
    return made.to(dtype)


def run(module, dtype, *, is_trained=True):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, TOKENS, SIZE, generator=generator).to(dtype).requires_grad_()
    slope = torch.randn(2, TOKENS, SIZE, generator=generator)
    module.weight.requires_grad_(is_trained)
    y = module(x)
    (y.float() * slope).sum().backward()
    return y.detach(), x.grad, module.weight.grad


@pytest.mark.parametrize("weight", [FLOAT, NARROW])
@pytest.mark.parametrize("dtype", [FLOAT, NARROW, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_values_have_the_bits_of_transformers_and_gradients_are_as_exact(kind, dtype, weight):
    plain, fused = norm(kind, weight), norm(kind, weight)
    assert fuse_norms(fused) == 1
    for is_trained in (True, False):
        y, dx, dw = run(plain, dtype, is_trained=is_trained)
        values, *gradients = run(fused, dtype, is_trained=is_trained)
        assert torch.equal(values, y) and values.dtype == y.dtype
        exact = 1e-2 if NARROW in (dtype, weight) else 2e-6
        for found, expected in zip(gradients, (dx, dw), strict=True):
            assert found.dtype == expected.dtype
            error = (found.double() - expected.double()).norm() / expected.double().norm()
            assert error < exact


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formula_in_float64(kind):
    """Weights that a bfloat16 row meets in float32, as in training: no further from the formula
    than transformers is."""
    distances = []
    for module in (norm(kind), norm(kind)):
        distances and fuse_norms(module)
        x = torch.randn(1, TOKENS, SIZE, generator=torch.Generator().manual_seed(4)).to(NARROW)
        slope = torch.randn(1, TOKENS, SIZE, generator=torch.Generator().manual_seed(5))
        x.requires_grad_()
        (module(x).float() * slope).sum().backward()
        x64 = x.detach().double().requires_grad_()
        w64 = module.weight.detach().double().requires_grad_()
        scale = w64 + 1 if kind in ("gemma3", "qwen3_next") else w64
        eps = getattr(module, "eps", None) or module.variance_epsilon
        y64 = scale * x64 * (x64.square().mean(-1, keepdim=True) + eps).rsqrt()
        (y64 * slope.double()).sum().backward()
        pairs = [(x.grad, x64.grad), (module.weight.grad, w64.grad)]
        distances.append([float((a.double() - b).norm() / b.norm()) for a, b in pairs])
    for plain, fused in zip(*distances, strict=True):
        assert fused < 1.05 * plain + 1e-6


def test_what_is_no_rms_norm_is_left_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(SIZE)), 1e-6

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.eps)

    class Gated(Scaled):
        def forward(self, x, gate):
            return super().forward(x) * gate

    modules = nn.ModuleList([Scaled(), Gated(), nn.LayerNorm(SIZE), nn.PReLU(SIZE)])
    assert fuse_norms(modules) == 0


def kept(module, x):
    """Bytes that a forward pass keeps beside its input and weight."""
    places, sizes = {x.untyped_storage()._cdata}, []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in places and tensor.shape != (SIZE,):
            places.add(storage._cdata)
            sizes.append(storage.nbytes())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x)
    return sum(sizes), y


def test_no_copy_of_the_row_is_kept():
    x = torch.randn(1, TOKENS, SIZE).to(NARROW).requires_grad_()
    fused = norm("llama")
    before, _ = kept(fused, x)
    fuse_norms(fused)
    after, _ = kept(fused, x)
    assert before >= 6 * x.numel()  # the row in float32, and the normed row
    assert after == 4 * TOKENS


def test_a_model_that_is_recomputed_has_the_gradients_of_transformers():
    ids = torch.arange(2, 62).repeat(36).reshape(2, -1)  # 2 x 1080 tokens
    outcomes = []
    for is_fused_too, policy in [(False, "none"), (True, "none"), (True, "full")]:
        model = tiny.model(num_hidden_layers=2)
        if is_fused_too:
            assert fuse_norms(model) == sum("RMSNorm" in type(m).__name__ for m in model.modules())
        recompute_activations(model, policy)
        model.train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        outcomes.append((loss, {n: p.grad for n, p in model.named_parameters()}))
    (loss, plain), (fused_loss, fused), (again_loss, again) = outcomes
    assert torch.equal(loss, fused_loss) and torch.equal(loss, again_loss)
    for name, gradient in plain.items():
        assert torch.equal(fused[name], again[name])
        torch.testing.assert_close(fused[name], gradient, rtol=1e-4, atol=1e-6)


def test_compiled_layers_have_the_plain_functions():
    model = tiny.model()
    fuse_norms(model)
    compile_layers(model.model.layers, backend="eager")
    assert not any(map(is_fused, model.model.layers.modules())) and is_fused(model.model.norm)
