"""DFT, EAFT and ASFT beside float64 loops over the full logits of a transformers model."""

import math

import pytest
import torch

import tiny
from surefoot.data.section import DataSection
from surefoot.model import outputs
from surefoot.model.outputs import logprob_head_of
from surefoot.parallel.section import ParallelSection
from surefoot.stages import SFT

ROWS = [[5, 6, 7, 8, 9], [3, 4, 2, 1], [9, 8, 7]]
LABELS = [[-100, -100, 7, 8, 9], [-100, 4, -100, 1], [-100, 8, 7]]
CASES = [
    SFT(loss_type="dft"),
    SFT(loss_type="eaft"),
    SFT(loss_type="eaft", eaft_alpha=0.5),
    SFT(loss_type="asft", asft_alpha=0.3),
]


def expected(stage, model, reference):
    """The loss as LLaMA-Factory 0.9.5 writes it: one token after the other, from the logits."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in zip(ROWS, LABELS, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        others = reference(input_ids=torch.tensor([ids])).logits[0].detach()
        for place, label in enumerate(labels[1:]):
            if label == -100:
                continue
            logps, anchors = logits[place].log_softmax(0), others[place].log_softmax(0)
            if stage.loss_type == "eaft":
                top = logits[place].detach().sort(descending=True).values[:20]
                probs = [math.exp(float(x - top.logsumexp(0))) for x in top]
                entropy = -sum(p * math.log(p) for p in probs)
                total = total - (entropy / 3.0) ** stage.eaft_alpha * logps[label]
            else:
                total = total - float(logps[label].detach().exp()) * logps[label]
            if stage.loss_type == "asft":
                total = total + stage.asft_alpha * (anchors.exp() * (anchors - logps)).sum()
            count += 1
    return total, count


def gradients_of(total, model):
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("stage", CASES, ids=lambda s: f"{s.loss_type}-{s.eaft_alpha}")
def test_loss_and_gradients_are_those_of_the_formula(stage, has_head):
    model = tiny.model("llama", dtype=torch.float64)
    reference = tiny.model("llama", dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(reference.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=seeded(number)))
    if stage.loss_type == "asft" and not has_head:
        pytest.skip("distributions are compared in the head")
    total, count = expected(stage, model, reference)
    wanted = gradients_of(total, model)

    items = [{"input_ids": i, "labels": x} for i, x in zip(ROWS, LABELS, strict=True)]
    batch = stage.collate(items, packing=False)
    head = logprob_head_of(model) if has_head else None
    target = None
    if stage.auxiliary:
        target = outputs.compute_target(reference, batch, logprob_head_of(reference))
    found = outputs.compute(model, batch, stage.spec, head=head, target=target)
    loss = stage.loss("policy", found, batch)
    assert int(loss.weight) == count
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-10)
    for name, gradient in gradients_of(loss.total, model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-12)


def seeded(number):
    return torch.Generator().manual_seed(number)


def test_an_evaluation_reports_the_perplexity_of_the_labels():
    stage, model = SFT(loss_type="dft"), tiny.model("llama", dtype=torch.float64)
    items = [{"input_ids": ROWS[0], "labels": LABELS[0]}]
    batch = stage.collate(items, packing=False)
    found = outputs.compute(model, batch, stage.eval_spec, head=logprob_head_of(model))
    loss = stage.loss("policy", found, batch)
    means = {name: (value / loss.weight).item() for name, value in loss.metrics.items()}
    shown = stage.metrics({"loss": (loss.total / loss.weight).item(), **means})
    logps = model(input_ids=batch.input_ids).logits[0].log_softmax(-1)
    nll = -(logps[1, 7] + logps[2, 8] + logps[3, 9]) / 3
    assert shown["perplexity"] == pytest.approx(math.exp(nll.item()))
    assert 0 <= shown["token_accuracy"] <= 1


def test_what_a_loss_cannot_use_is_refused():
    with pytest.raises(ValueError, match="label_smoothing_factor has no effect on loss_type dft"):
        SFT(loss_type="dft", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="eaft_alpha must not be negative"):
        SFT(loss_type="eaft", eaft_alpha=-1)
    sharded = ParallelSection(tp=2, pp=2)
    data = DataSection(datasets=("any",))
    for loss, axes in (
        ("cross_entropy", []),
        ("dft", []),
        ("eaft", ["tp"]),
        ("asft", ["tp", "pp"]),
    ):
        found = SFT(loss_type=loss).problems(data, sharded)
        assert [problem.path[1] for problem in found] == axes
