"""Every kernel of packed rows beside softmax(q k) v written out in float64 for each document."""

from itertools import pairwise

import pytest
import torch
from exact import assert_all_close, assert_close
from torch import nn

import tiny
from surefoot.model import isolation, numerics, packed_attention, packed_kernels
from surefoot.model.packed_attention import DocumentBounds, by_document

pytestmark = pytest.mark.gpu
NAMES = ("result", "dq", "dk", "dv")
KERNELS = ["sdpa", "eager", "varlen", "flex"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.2


def row(device, dtype=torch.float32):
    """Documents of many lengths, one of them a single token; four query heads share a key head."""
    bounds = [0, 700, 707, 708, 1091, 2048] if device.type == "cuda" else [0, 40, 47, 48, 96]
    return packed_kernels.Row(8, 2, 64 if device.type == "cuda" else 16, bounds, device, dtype)


def kernel_of(name, device, dtype=torch.bfloat16):
    """The kernel ``name``, or a skip that says why it cannot run."""
    if name in packed_attention.KERNELS:
        attend = by_document(packed_attention.KERNELS[name])

        def run(heads, bounds, scaling):
            told = {"document_bounds": bounds, "scaling": scaling}
            return attend(nn.Identity(), *heads, None, **told)[0]

        return run
    if device.type != "cuda":
        pytest.skip(f"needs a GPU: {name} has no backward pass on a CPU")
    if name != "flex" and dtype == torch.float32:
        pytest.skip(f"{name} computes in 16 bits only")
    if name == "flex":
        torch._dynamo.reset()  # or it is compiled for too many shapes, and then not at all
    return packed_kernels.candidates(device)[name]


def reference(heads, bounds, scaling):
    groups = heads[0].shape[1] // heads[1].shape[1]
    q, *kv = (each.double() for each in heads)
    k, v = (each.repeat_interleave(groups, dim=1) for each in kv)
    parts = []
    for a, b in pairwise(bounds.values):
        scores = q[:, :, a:b] @ k[:, :, a:b].mT * scaling
        seen = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).tril()
        parts.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, :, a:b])
    return torch.cat(parts, dim=2).transpose(1, 2)


def found(kernel, inputs, bounds, weights):
    """The result, and the gradients of a weighted sum of it."""
    heads = [each.detach().clone().requires_grad_() for each in inputs]
    result = kernel(heads, DocumentBounds(bounds), SCALE)
    result.backward(weights.to(result.dtype))
    return [result.detach(), *(each.grad for each in heads)]


def weights_of(given):
    shape = (1, given.bounds[-1], given.num_heads, given.head_dim)
    dice = torch.Generator(given.device).manual_seed(1)
    return torch.randn(shape, generator=dice, device=given.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_are_those_of_float64(name, dtype, device):
    given, kernel = row(device, dtype), kernel_of(name, device, dtype)
    inputs, weights = given.inputs(), weights_of(given).to(dtype)
    exact = found(reference, [each.double() for each in inputs], given.bounds, weights)
    assert_all_close(found(kernel, inputs, given.bounds, weights), exact, dtype, NAMES)


@pytest.mark.parametrize("name", KERNELS)
def test_no_document_sees_another(name, device):
    """To the bit, whatever the other document contains; and no gradient reaches it."""
    kernel, given = kernel_of(name, device), row(device, torch.bfloat16)
    inputs, weights = given.inputs(), weights_of(given)
    weights[:, : given.bounds[1]] = 0.0
    changed = [each.clone() for each in inputs]
    for each in changed:
        each[:, :, : given.bounds[1]] *= -30.0
    before, after = (found(kernel, each, given.bounds, weights) for each in (inputs, changed))
    assert torch.equal(before[0][:, given.bounds[1] :], after[0][:, given.bounds[1] :])
    for gradient in after[1:]:
        assert not gradient[:, :, : given.bounds[1]].any()
    for one, other in zip(before[1:], after[1:], strict=True):
        assert_close(other, one, torch.bfloat16)


@pytest.mark.parametrize("name", KERNELS)
def test_with_deterministic_kernels_each_repeats_its_bits(name, device, deterministic):
    kernel, given = kernel_of(name, device), row(device, torch.bfloat16)
    inputs, weights = given.inputs(), weights_of(given)
    first, *others = (found(kernel, inputs, given.bounds, weights) for _ in range(8))
    for other in others:
        for name, one, two in zip(NAMES, first, other, strict=True):
            assert torch.equal(one, two), name


def test_the_kernel_that_a_run_selects_passes_its_own_check(device, deterministic, caplog):
    caplog.set_level("INFO")
    chosen = packed_kernels.choose(row(device, torch.bfloat16))
    expected = "varlen" if device.type == "cuda" else packed_kernels.BY_DOCUMENT
    assert chosen == expected, caplog.text


@pytest.mark.parametrize("name", KERNELS)
def test_a_model_of_packed_rows_gives_the_logits_of_its_documents_alone(name, device):
    kernel_of(name, device)
    attention = name if name in packed_attention.KERNELS else "sdpa"
    model = tiny.model("qwen3", attention=attention, head_dim=16).to(device)
    exact = tiny.model("qwen3", attention="eager", head_dim=16, dtype=torch.float64).to(device)
    isolation.use_packed(model)
    if name not in packed_attention.KERNELS:
        packed_kernels.use(model, name)
    documents = [torch.arange(n, device=device) * 7 % 60 + 3 for n in (5, 1, 9, 12)]
    bounds = torch.tensor([0, *torch.tensor([5, 1, 9, 12]).cumsum(0)]).int()
    positions = torch.cat([torch.arange(len(d), device=device) for d in documents])[None]
    row = {"input_ids": torch.cat(documents)[None], "position_ids": positions, "use_cache": False}
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        logits = model(**row, **packed_attention.packed_arguments(model, bounds)).logits[0]
    with torch.no_grad():
        alone = [exact(input_ids=each[None], use_cache=False).logits[0] for each in documents]
    assert_close(logits, torch.cat(alone), torch.bfloat16)


class Modes(torch.autograd.Function):
    """An operation that notes whether torch is in strict mode, forward and backward."""

    seen = []

    @staticmethod
    def note():
        Modes.seen.append(not torch.is_deterministic_algorithms_warn_only_enabled())

    @staticmethod
    def forward(ctx, x):
        Modes.note()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Modes.note()
        return gradient


def test_strict_mode_is_on_in_attention_forward_and_backward_and_nowhere_else(
    device, deterministic, monkeypatch
):
    monkeypatch.setattr(numerics, "STRICT_DEVICES", {device.type})
    monkeypatch.setattr(Modes, "seen", [])
    inputs = [torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3)]
    before = [Modes.apply(each) for each in inputs]

    def attend(heads):
        plain = packed_attention.Scoring(None, 0.0, None, None)
        return Modes.apply(packed_attention.sdpa(heads, plain))

    Modes.apply(numerics.deterministically(attend, before)).sum().backward()
    outside, inside = [False] * 3, [True]
    assert Modes.seen == [*outside, *inside, False, False, *inside, *outside]
    gradients = [each.grad.clone() for each in inputs]
    packed_attention.sdpa(inputs, packed_attention.Scoring(None, 0.0, None, None)).sum().backward()
    for each, gradient in zip(inputs, gradients, strict=True):
        assert torch.equal(each.grad, 2 * gradient)
