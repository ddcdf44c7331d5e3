"""Log-probabilities of a chunk of logits, and the gradient of their loss."""

import pytest
import torch
import torch.nn.functional as F

from surefoot.model.chunked_cross_entropy import Head


def reference(logits, labels, softcap, smoothing):
    logits = logits.double().requires_grad_()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logps = capped.log_softmax(-1)
    loss = F.cross_entropy(capped, labels, label_smoothing=smoothing, reduction="sum")
    found = torch.autograd.grad(loss, logits)[0]
    return logps.gather(1, labels[:, None])[:, 0], logps.sum(-1), found


def inputs(dtype, columns=701):
    torch.manual_seed(0)
    return (3 * torch.randn(6, columns)).to(dtype), torch.randint(columns, (6,))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_torch_gives_what_the_loss_of_a_reference_gives(softcap, smoothing):
    logits, labels = inputs(torch.float64)
    head = Head(torch.eye(logits.shape[1], dtype=logits.dtype), softcap=softcap)
    found = head.gradients_of(logits, labels, smoothing, True)
    logps, sums, learnt = reference(logits, labels, softcap, smoothing)
    torch.testing.assert_close(found[0], logps.detach())
    torch.testing.assert_close(found[2], learnt)
    if smoothing:
        torch.testing.assert_close(found[1], sums.detach())
