"""Bytes that are alive, on real tensors whose lives are known."""

import torch

from surefoot.use.estimate._dry_run import LiveBytes

MB = 250_000  # float32 in a megabyte


def test_what_is_made_is_counted_until_nobody_has_it():
    with LiveBytes([], vocabulary=0) as live:
        a = torch.zeros(MB)
        assert live.now.activations == 1_000_000
        b = a + 1
        assert live.now.activations == 2_000_000
        del a
        assert live.now.activations == 1_000_000
        del b
        assert live.now.total == 0
    assert live.peak.total == 2_000_000


def test_a_view_takes_nothing_and_holds_all_of_it():
    with LiveBytes([], vocabulary=0) as live:
        a = torch.zeros(1000, 250)
        row = a[3]
        assert live.now.total == 1_000_000
        del a
        assert live.now.total == 1_000_000
        del row
        assert live.now.total == 0


def test_what_was_there_before_is_not_counted():
    a = torch.zeros(MB)
    with LiveBytes([], vocabulary=0) as live:
        a += 1
        a.view(-1, 2).mul_(3)
    assert live.peak.total == 0


def test_what_autograd_saves_stays_until_the_backward_pass():
    weight = torch.ones(MB, requires_grad=True)
    with LiveBytes([weight], vocabulary=0) as live:
        loss = (weight * 2).exp().sum()
        assert live.now.total == 1_000_004, "the result of exp is saved, its argument is not"
        loss.backward()
        del loss
        assert live.now.total == 1_000_000, "the gradient"


def test_conversions_of_weights_and_tensors_as_wide_as_the_vocabulary_are_told_apart():
    weight = torch.ones(500, 8)
    with LiveBytes([weight], vocabulary=500) as live:
        copy = weight.to(torch.bfloat16)
        logits = torch.ones(4, 8, dtype=torch.bfloat16) @ copy.T
        assert live.now.copies == 500 * 8 * 2
        assert live.now.logits == 4 * 500 * 2
        assert live.now.activations == 0
        del copy, logits
    assert live.peak.activations == 4 * 8 * 2


def test_the_peak_with_what_grows_beside_is_another_one():
    grown = 0
    with LiveBytes([], vocabulary=0, beside=lambda: grown) as live:
        a = torch.zeros(MB)
        del a
        grown = 3_000_000
        torch.zeros(10)
    assert live.peak.total == 1_000_000
    assert live.growing == 3_000_040
