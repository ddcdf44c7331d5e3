"""Log-probabilities of the labels against the model's own full logits."""

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

import tiny
from surefoot.batch import IGNORE_INDEX, Batch, OutputSpec
from surefoot.model import outputs
from surefoot.model.isolation import use_packed


def padded(rows, labels):
    length = max(map(len, rows))
    fill = lambda lists, value: torch.tensor([[*x, *[value] * (length - len(x))] for x in lists])  # noqa: E731
    return Batch(
        input_ids=fill(rows, 0),
        labels=fill(labels, IGNORE_INDEX),
        position_ids=torch.arange(length).repeat(len(rows), 1),
        attention_mask=fill([[1] * len(r) for r in rows], 0),
    )


def flat(rows, labels):
    return Batch(
        input_ids=torch.tensor([[i for row in rows for i in row]]),
        labels=torch.tensor([[i for x in labels for i in (IGNORE_INDEX, *x[1:])]]),
        position_ids=torch.tensor([[i for r in rows for i in range(len(r))]]),
        cu_seqlens=torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0)]).int(),
    )


NEEDS = ("logps", "entropies", "predictions")
ROWS = [[5, 9, 11, 7], [8, 3], [4, 4, 6, 21, 30, 31]]
LABELS = [[-100, -100, 11, 7], [-100, 3], [4, 4, -100, 21, 30, 31]]


def expected_logps(model):
    return expected(model)[0]


def expected(model):
    logps, entropies, best = [], [], []
    for row, label in zip(ROWS, LABELS, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        for t in range(1, len(row)):
            if label[t] != IGNORE_INDEX:
                logps.append(logits[t - 1, label[t]])
                entropies.append(-(logits[t - 1].exp() * logits[t - 1]).sum())
                best.append(logits[t - 1].argmax())
    return torch.stack(logps), torch.stack(entropies), torch.stack(best)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("make", [padded, flat])
def test_outputs_are_those_of_each_row_alone_in_reading_order(kind, make):
    reference, model = (tiny.model(kind, dtype=torch.float64) for _ in range(2))
    if make is flat:
        use_packed(model)
    found = outputs.compute(model, make(ROWS, LABELS), OutputSpec(NEEDS))
    logps, entropies, best = expected(reference)
    torch.testing.assert_close(found.logps, logps)
    torch.testing.assert_close(found.entropies, entropies)
    assert torch.equal(found.predictions, best)


@pytest.mark.parametrize("make", [padded, flat])
@pytest.mark.parametrize("has_head", [True, False])
def test_a_model_that_computes_all_logits_whichever_are_asked_for_has_the_same_outputs(
    make, has_head, monkeypatch
):
    model = tiny.model()
    if make is flat:
        use_packed(model)
    head = outputs.logprob_head_of(model) if has_head else None
    spec = OutputSpec(("logps",))
    batch = make(ROWS, LABELS)
    usual, forward = outputs.compute(model, batch, spec, head=head).logps, model.forward
    monkeypatch.setattr(
        model, "forward", lambda logits_to_keep=0, **given: forward(logits_to_keep=0, **given)
    )
    torch.testing.assert_close(outputs.compute(model, batch, spec, head=head).logps, usual)


@pytest.mark.parametrize("make", [padded, flat])
def test_smoothed_labels_are_those_of_the_trainer(make):
    reference, model = (tiny.model(dtype=torch.float64) for _ in range(2))
    if make is flat:
        use_packed(model)
    found = outputs.compute(model, make(ROWS, LABELS), OutputSpec(("total",), smoothing=0.1))
    whole = reference(
        **{n: getattr(padded(ROWS, LABELS), n) for n in ("input_ids", "attention_mask")}
    )
    smoother = LabelSmoother(epsilon=0.1)
    expected = smoother(whole, padded(ROWS, LABELS).labels, shift_labels=True, num_items_in_batch=1)
    torch.testing.assert_close(-found.smoothed, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.total, sum(expected_logps(reference)))


def test_what_was_not_asked_for_is_not_computed():
    found = outputs.compute(tiny.model(), padded(ROWS, LABELS), OutputSpec(("logps",)))
    assert found.entropies is None
    assert found.predictions is None


def test_a_batch_with_nothing_to_learn_gives_no_outputs_but_a_gradient_of_zero():
    model = tiny.model().requires_grad_(True)
    found = outputs.compute(
        model, padded(ROWS, [[-100] * len(r) for r in ROWS]), OutputSpec(("logps",))
    )
    assert found.logps.shape == (0,)
    found.logps.sum().backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
