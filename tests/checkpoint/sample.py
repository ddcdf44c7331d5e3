"""A small run's states, as a trainer would have them, and what makes two of them equal."""

import math
from pathlib import Path

import torch


class Holder:
    """The simplest Stateful: it is its state."""

    def __init__(self, state):
        self.state = state
        self.loads = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.loads += 1


def sample_states(seed=0, scale=1):
    """Model, optimizer and the rest, a few kilobytes in all; ``scale`` makes the tensors larger."""
    torch.manual_seed(seed)
    model = {
        "model.embed_tokens.weight": torch.randn(16 * scale, 8),
        "model.layers.0.q_proj.weight": torch.randn(8, 8 * scale).bfloat16(),
        "model.layers.0.mask": torch.rand(5) > 0.5,
        "model.norm.weight": torch.randn(8),
    }
    moments = {
        name: {
            "exp_avg": torch.randn(t.shape),
            "exp_avg_sq": torch.rand(t.shape),
            "step": torch.tensor(3.0),
        }
        for name, t in model.items()
        if t.is_floating_point()
    }
    return {
        "model": Holder(model),
        "optimizer": Holder({**moments, "groups": [{"lr": 1e-4, "betas": (0.9, 0.999)}]}),
        "random": Holder(
            {"torch": torch.randint(0, 256, (64,), dtype=torch.uint8), "python": (3, (1, 2), None)}
        ),
        "loader": Holder({"epoch": 1, "index": 12345, "seed": 2**63 + seed}),
        "trainer": Holder(
            {"global_step": 7, "best_metric": math.inf, "log_history": [{"loss": 0.1 + 0.2}]}
        ),
    }


def blank(states):
    """The same states with other values: what a fresh process has before it resumes."""
    model = {name: torch.zeros_like(t) for name, t in states["model"].state.items()}
    return {"model": Holder(model), **{name: Holder({}) for name in states if name != "model"}}


def same(one, other):
    """Equal in type and value, tensors bit by bit, NaN equal to NaN, -0.0 not to 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and same_bits(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return one == other


def same_bits(one, other):
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def same_states(one, other):
    return all(same(dict(one[name].state), dict(other[name].state)) for name in one)


def num_open():
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def tree_bytes(folder):
    """Every file below ``folder`` with its content: what must not change."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
