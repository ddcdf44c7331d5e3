"""Divergences in chunks, beside float64 loops over their definitions, and finite differences."""

import math

import pytest
import torch

import tiny
from each import some
from surefoot.batch import Divergence, OutputSpec
from surefoot.data.text.collation import collate
from surefoot.model import chunked_cross_entropy, outputs
from surefoot.model.chunked_cross_entropy import KINDS, Head, TargetDistribution, divergences
from surefoot.model.outputs import logprob_head_of

N, D, V = 11, 5, 17
CASES = [
    Divergence("teacher", "forward_kl"),
    Divergence("teacher", "reverse_kl", temperature=2.0),
    Divergence("teacher", "jsd", beta=0.5),
    Divergence("teacher", "jsd", beta=0.9, temperature=0.7),
]


def loop(student, teacher, divergence):
    """The divergence of two rows of logits by its definition (arXiv:2306.13649, eq. 1)."""

    def softmax(row):
        values = [math.exp(x / divergence.temperature) for x in row]
        return [value / sum(values) for value in values]

    def kl(a, b):
        return math.fsum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True))

    q, p, beta = softmax(student), softmax(teacher), divergence.beta
    if divergence.kind == "forward_kl":
        return kl(p, q)
    if divergence.kind == "reverse_kl":
        return kl(q, p)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def made(dtype=torch.float64, *, words=V, softcap=None):
    torch.manual_seed(3)
    head = Head(torch.randn(V, D, dtype=dtype), torch.randn(V, dtype=dtype), softcap)
    other = Head(torch.randn(words, D + 2, dtype=dtype), None, None)
    target = TargetDistribution(torch.randn(N, D + 2, dtype=dtype), other)
    return head, torch.randn(N, D, dtype=dtype), torch.randint(V, (N,)), target


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK", 4)


@pytest.mark.parametrize("divergence", CASES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_are_those_of_the_definition(divergence, softcap):
    head, hidden, labels, target = made(softcap=softcap)
    found, logps = divergences(head, hidden, labels, target, divergence)
    students, teachers = head.logits(hidden), target.head.logits(target.hidden)
    wanted = [
        loop(a, b, divergence) for a, b in zip(students.tolist(), teachers.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    expected = students.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(logps, expected, rtol=1e-12, atol=1e-12)
    assert min(found.tolist()) > 0


@pytest.mark.parametrize("divergence", CASES, ids=str)
@pytest.mark.parametrize("softcap", some([None, 1.5], [1.5]))
def test_gradients_are_those_of_finite_differences(divergence, softcap):
    head, hidden, labels, target = made(softcap=softcap)

    def both(hidden, weight, bias):
        return divergences(Head(weight, bias, softcap), hidden, labels, target, divergence)

    given = [t.clone().requires_grad_() for t in (hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(both, given)
    alone = [given[0], head.weight, head.bias]
    assert torch.autograd.gradcheck(lambda *x: both(*x)[0], alone)


@pytest.mark.parametrize("divergence", CASES, ids=str)
def test_chunks_change_nothing(divergence, monkeypatch):
    head, hidden, labels, target = made()
    found = divergences(head, hidden, labels, target, divergence)
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK", 100)
    whole = divergences(head, hidden, labels, target, divergence)
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("words", [V - 4, V + 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_only_one_model_has_take_no_part(words, kind):
    head, hidden, labels, target = made(words=words)
    divergence, least = Divergence("teacher", kind), min(words, V)
    hidden.requires_grad_()
    found, _ = divergences(head, hidden, labels, target, divergence)
    narrow = Head(head.weight[:least], head.bias[:least])
    other = TargetDistribution(target.hidden, Head(target.head.weight[:least]))
    wanted, _ = divergences(narrow, hidden, labels % least, other, divergence)
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(values.sum(), hidden)[0] for values in (found, wanted)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_does_not_differ_from_itself(kind):
    head, hidden, labels, _ = made()
    hidden.requires_grad_()
    same = TargetDistribution(hidden.detach(), head)
    found, _ = divergences(head, hidden, labels, same, Divergence("teacher", kind))
    assert found.abs().max() < 1e-12
    assert torch.autograd.grad(found.sum(), hidden)[0].abs().max() < 1e-12


def test_probabilities_too_small_for_float32_give_numbers():
    head = Head(torch.eye(V))
    hidden = torch.zeros(2, V)
    hidden[0, 0], hidden[1, 1] = 400.0, -400.0
    target = TargetDistribution(-hidden, head)
    for kind in KINDS:
        inputs = hidden.clone().requires_grad_()
        found, _ = divergences(
            head, inputs, torch.zeros(2, dtype=torch.long), target, Divergence("t", kind)
        )
        found.sum().backward()
        assert found.isfinite().all()
        assert inputs.grad.isfinite().all()


def test_a_whole_model_gives_what_its_logits_give():
    student, teacher = tiny.model("qwen2").double(), tiny.model("gemma2").double()
    features = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
        {"input_ids": [9, 10, 11], "labels": [-100, -100, 11]},
    ]
    batch = collate(features, packing=False)
    divergence = Divergence("teacher", "jsd", beta=0.3)
    spec = OutputSpec(("divergences", "logps"), divergence=divergence)
    target = outputs.compute_target(teacher, batch, logprob_head_of(teacher))
    found = outputs.compute(student, batch, spec, head=logprob_head_of(student), target=target)
    given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    logits = [model(**given).logits for model in (student, teacher)]
    at = [(0, 0), (0, 2), (1, 1)]
    wanted = [loop(*(x[row, column].tolist() for x in logits), divergence) for row, column in at]
    assert found.divergences.tolist() == pytest.approx(wanted, rel=1e-10)
