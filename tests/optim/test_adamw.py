"""AdamW against a float64 loop, and its state by name."""

import pytest
import torch

from surefoot.errors import CheckpointError
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.state import NamedState


def parameters(dtype=torch.float64):
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(3, 4, dtype=dtype))
    bias = torch.nn.Parameter(torch.randn(4, dtype=dtype))
    return [("layer.weight", matrix), ("layer.bias", bias)]


def train(optimizer, named, steps):
    for step in range(steps):
        for i, (_, p) in enumerate(named):
            p.grad = torch.sin(p.detach() * (step + 1) + i)
        optimizer.step()


def test_ten_steps_equal_the_paper_written_out():
    settings = AdamW(learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95, epsilon=1e-6)
    named = parameters()
    expected = [p.detach().clone() for _, p in named]
    train(settings.build(named), named, 10)
    for i, x in enumerate(expected):
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t in range(1, 11):
            g = torch.sin(x * t + i)
            x -= 0.1 * (0.3 if x.ndim > 1 else 0.0) * x
            m = 0.8 * m + 0.2 * g
            v = 0.95 * v + 0.05 * g * g
            x -= 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-6)
        torch.testing.assert_close(named[i][1].detach(), x)


def test_state_goes_by_name_whatever_the_order():
    named = parameters()
    optimizer = AdamW().build(named)
    train(optimizer, named, 3)
    state = {
        n: {k: t.clone() for k, t in s.items()}
        for n, s in NamedState(optimizer).state_dict().items()
    }
    assert set(state) == {"layer.weight", "layer.bias"}

    again = parameters()
    for (_, a), (_, b) in zip(again, named, strict=True):
        a.data.copy_(b.data)
    other = AdamW().build(list(reversed(again)))
    NamedState(other).load_state_dict(state)
    train(optimizer, named, 2)
    train(other, again, 2)
    for (_, a), (_, b) in zip(again, named, strict=True):
        assert torch.equal(a, b)


def test_state_of_other_parameters_is_refused():
    optimizer = AdamW().build(parameters())
    moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2), "step": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match="other parameters"):
        NamedState(optimizer).load_state_dict({"another.weight": moments})


def test_warm_up_in_steps_wins_over_the_ratio():
    assert AdamW(warmup_ratio=0.5, warmup_steps=3).schedule_over(100).warmup_steps == 3
    assert AdamW(warmup_ratio=0.25).schedule_over(10).warmup_steps == 3
