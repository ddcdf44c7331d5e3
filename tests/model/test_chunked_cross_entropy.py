"""The head without logits gives what logits give, gradients too."""

import pytest
import torch
import torch.nn.functional as F
from transformers.trainer_pt_utils import LabelSmoother

from surefoot.model import chunked_cross_entropy
from surefoot.model.chunked_cross_entropy import Head, logps, scores, totals

N, D, V = 23, 7, 41


def total(head, hidden, labels):
    return totals(head, hidden, labels, 0.0)[0]


@pytest.fixture(autouse=True)
def chunks_that_do_not_divide(monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK", 5)


def inputs(dtype=torch.float64, *, bias=True):
    torch.manual_seed(0)
    tensors = [torch.randn(N, D), torch.randn(V, D)] + ([torch.randn(V)] if bias else [])
    return [t.to(dtype).requires_grad_() for t in tensors], torch.randint(V, (N,))


def reference(tensors, labels, softcap):
    logits = F.linear(*tensors)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return logps.gather(1, labels[:, None])[:, 0], entropies, logits.argmax(-1), logps.mean(-1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_sum_and_its_gradients_are_those_of_the_logits(bias, softcap):
    tensors, labels = inputs(bias=bias)
    weight = torch.tensor(-0.7, dtype=torch.float64)
    found = total(Head(tensors[1], *(tensors[2:] or [None]), softcap), tensors[0], labels)
    expected = reference(tensors, labels, softcap)[0].sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found * weight, tensors),
        torch.autograd.grad(expected * weight, tensors),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_sum_of_smoothed_labels_and_its_gradients_are_the_trainers(bias, softcap):
    tensors, labels = inputs(bias=bias)
    head = Head(tensors[1], *(tensors[2:] or [None]), softcap)
    found, plain, _ = totals(head, tensors[0], labels, 0.3)
    logits = F.linear(*tensors)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = -LabelSmoother(epsilon=0.3)({"logits": logits}, labels, num_items_in_batch=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)  # it sums in float32
    torch.testing.assert_close(plain, reference(tensors, labels, softcap)[0].sum())
    assert not plain.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(found, tensors),
        torch.autograd.grad(expected, tensors),
        rtol=1e-6,
        atol=1e-6,
    )
    exact = F.cross_entropy(logits, labels, label_smoothing=0.3, reduction="sum")
    torch.testing.assert_close(found, -exact)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_each_score_and_the_gradients_of_any_function_of_them(bias, softcap):
    tensors, labels = inputs(bias=bias)
    found = scores(Head(tensors[1], *(tensors[2:] or [None]), softcap), tensors[0], labels)
    logps, entropies, best, means = reference(tensors, labels, softcap)
    torch.testing.assert_close(found.logps, logps)
    torch.testing.assert_close(found.entropies, entropies)
    torch.testing.assert_close(found.means, means)
    assert torch.equal(found.predictions, best)
    weights = torch.randn(3, N, dtype=torch.float64)
    ours = (found.logps.sigmoid() * weights[0] + found.entropies * weights[1]).sum()
    theirs = (logps.sigmoid() * weights[0] + entropies * weights[1]).sum()
    ours, theirs = ours + (found.means * weights[2]).sum(), theirs + (means * weights[2]).sum()
    torch.testing.assert_close(
        torch.autograd.grad(ours, tensors), torch.autograd.grad(theirs, tensors)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("learns", ["all", "hidden", "matrix"])
def test_each_logp_and_the_gradients_of_any_function_of_them(learns, softcap, bias):
    tensors, labels = inputs(bias=bias)
    chosen = {"all": tensors, "hidden": tensors[:1], "matrix": tensors[1:]}[learns]
    for tensor in tensors:
        tensor.requires_grad_(any(tensor is one for one in chosen))
    found = logps(Head(tensors[1], *(tensors[2:] or [None]), softcap), tensors[0], labels)
    expected = reference(tensors, labels, softcap)[0]
    torch.testing.assert_close(found, expected)
    weights = torch.randn(N, dtype=torch.float64)
    ours, theirs = ((t.sigmoid() * weights).sum() for t in (found, expected))
    torch.testing.assert_close(
        torch.autograd.grad(ours, chosen), torch.autograd.grad(theirs, chosen)
    )


def test_what_does_not_learn_costs_no_gradient():
    (hidden, weight, _), labels = inputs()
    frozen = weight.detach()
    (found,) = torch.autograd.grad(total(Head(frozen), hidden, labels), hidden)
    (expected,) = torch.autograd.grad(reference([hidden, frozen], labels, None)[0].sum(), hidden)
    torch.testing.assert_close(found, expected)
    assert not total(Head(frozen), hidden.detach(), labels).requires_grad


def test_half_precision_is_summed_in_single():
    tensors, labels = inputs(torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in tensors]
    found = total(Head(tensors[1], tensors[2]), tensors[0], labels)
    expected = reference(wide, labels, None)[0].sum()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.1)
    for ours, theirs in zip(
        torch.autograd.grad(found, tensors), torch.autograd.grad(expected, wide), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.1)


def test_a_matrix_in_single_multiplied_in_half_has_a_gradient_in_single():
    tensors, labels = inputs(torch.float32)
    found = total(Head(*tensors[1:], dtype=torch.bfloat16), tensors[0], labels)
    expected = reference(tensors, labels, None)[0].sum()
    for ours, theirs in zip(
        torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors), strict=True
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)


def test_no_labels_are_no_problem():
    (hidden, weight, bias), _ = inputs()
    none = torch.empty(0, dtype=torch.int64)
    found = total(Head(weight, bias), hidden[:0], none)
    assert found.item() == 0
    assert not torch.autograd.grad(found, weight)[0].any()
    assert scores(Head(weight, bias), hidden[:0], none).logps.shape == (0,)
    each = logps(Head(weight, bias), hidden[:0], none)
    assert each.shape == (0,)
    assert not torch.autograd.grad(each.sum(), weight)[0].any()
