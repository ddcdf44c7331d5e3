"""Fused LoRA and the head in chunks beside plain torch in float64, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from exact import assert_all_close
from peft.tuners.lora import Linear

import tiny
from surefoot.methods import LoRA
from surefoot.model.chunked_cross_entropy import CHUNK, Head, logps, scores, totals
from surefoot.model.lora_layers import enable_fused_lora

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]
OUTPUTS = ("total", "logps", "scores")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_lora_layer_is_its_formula(dtype, device):
    model = LoRA(rank=4, alpha=12).apply(tiny.model("qwen2")).to(device, dtype)
    enable_fused_lora(model)
    layer = next(m for m in model.modules() if isinstance(m, Linear))
    assert "forward" in vars(layer)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.manual_seed(0)
    with torch.no_grad():
        b.normal_(std=0.3)
    x = torch.randn(3, 50, layer.in_features, device=device).to(dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    weight, bias = layer.base_layer.weight.double(), layer.base_layer.bias.double()
    y = F.linear(wide[0], weight, bias) + 3.0 * F.linear(F.linear(wide[0], wide[1]), wide[2])
    slopes = torch.randn(y.shape, device=device).to(dtype)
    exact = [y.detach(), *torch.autograd.grad(y, wide, slopes.double())]
    ours = layer(x)
    found = [ours.detach(), *torch.autograd.grad(ours, [x, a, b], slopes)]
    assert_all_close(found, exact, dtype, ("y", "dx", "da", "db"))


def head_inputs(device, dtype):
    """Hidden states of more than two chunks, and a head with a bias."""
    dice = torch.Generator(device).manual_seed(0)
    shapes = ((2 * CHUNK + 17, 32), (211, 32), (211,))
    tensors = [torch.randn(s, generator=dice, device=device).mul_(0.4).to(dtype) for s in shapes]
    labels = torch.randint(shapes[1][0], shapes[0][:1], generator=dice, device=device)
    return [t.requires_grad_() for t in tensors], labels


def value(kind, head, hidden, labels, slopes):
    """One number, of which all that ``kind`` computes is a part; and its log-probabilities."""
    if kind == "total":
        smoothed, plain, _ = totals(head, hidden, labels, 0.1)
        return smoothed, plain
    if kind == "logps":
        found = logps(head, hidden, labels)
        return (found * slopes[0]).sum(), found
    found = scores(head, hidden, labels)
    terms = (found.logps, found.entropies, found.means)
    return sum((t * s).sum() for t, s in zip(terms, slopes, strict=True)), found.logps


def plain(kind, tensors, labels, slopes, softcap):
    logits = F.linear(*tensors)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    each = logits.log_softmax(-1)
    own = each.gather(1, labels[:, None])[:, 0]
    if kind == "total":
        return 0.9 * own.sum() + 0.1 * each.mean(-1).sum(), own.sum()
    if kind == "logps":
        return (own * slopes[0]).sum(), own
    terms = (own, -(each.exp() * each).sum(-1), each.mean(-1))
    return sum((t * s).sum() for t, s in zip(terms, slopes, strict=True)), own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_head_in_chunks_is_that_of_full_logits(kind, softcap, dtype, device):
    tensors, labels = head_inputs(device, dtype)
    slopes = torch.randn(3, len(labels), device=device).abs() + 0.1
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact, own = plain(kind, wide, labels, slopes.double(), softcap)
    head = Head(*tensors[1:], softcap)
    found, logprobs = value(kind, head, tensors[0], labels, slopes)
    results = [found.detach(), logprobs.detach(), *torch.autograd.grad(found, tensors)]
    expected = [exact.detach(), own.detach(), *torch.autograd.grad(exact, wide)]
    names = ("value", "logps", "dhidden", "dweight", "dbias")
    assert_all_close(results, expected, dtype, names)


@pytest.mark.parametrize("kind", ["total", "logps"])
def test_a_frozen_head_gives_the_same_gradient_of_hidden_states(kind, device):
    tensors, labels = head_inputs(device, torch.float32)
    slopes = torch.rand(3, len(labels), device=device)
    frozen = [t.detach() for t in tensors[1:]]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact, _ = plain(kind, wide, labels, slopes.double(), None)
    found, _ = value(kind, Head(*frozen), tensors[0], labels, slopes)
    results = torch.autograd.grad(found, tensors[:1])
    assert_all_close(results, torch.autograd.grad(exact, wide[:1]), torch.float32, ("dhidden",))
