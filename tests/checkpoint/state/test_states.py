"""What torch has is saved as it is: modules, tied or not, optimizers, schedules, generators."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from surefoot.checkpoint import (
    CheckpointError,
    NamedOptimizer,
    RandomState,
    load,
    open_folder,
    save,
)

from ..sample import same


class Tied(nn.Module):
    """Embeddings that are the head as well, a buffer, dropout and a frozen part."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.inner(self.embed(ids)))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "lbfgs-like state": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:], "lr": 0.02}], amsgrad=True
    ),
}
SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7]),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
}


class Run:
    """A plain loop with all that its future depends on."""

    def __init__(self, optimizer="adamw", schedule="cosine", seed=0, named=False):
        self.model = Tied(seed)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.states = {
            "model": self.model,
            "optimizer": NamedOptimizer(self.optimizer, self.model.named_parameters())
            if named
            else self.optimizer,
            "schedule": self.schedule,
            "random": RandomState(),
        }

    def steps(self, count):
        losses = []
        for _ in range(count):
            ids = torch.from_numpy(np.random.randint(0, 16, 12))
            loss = nn.functional.cross_entropy(self.model(ids), ids.roll(random.randint(1, 3)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append((loss.item(), self.schedule.get_last_lr()))
        return losses


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


CASES = [(name, "cosine", False) for name in OPTIMIZERS]
CASES += [(name, "cosine", True) for name in OPTIMIZERS]
CASES += [("sgd", name, False) for name in SCHEDULES if name != "cosine"]


@pytest.mark.parametrize(("optimizer", "schedule", "named"), CASES)
def test_a_resumed_loop_is_bitwise_the_uninterrupted_one(tmp_path, optimizer, schedule, named):
    run = Run(optimizer, schedule, named=named)
    seed_all(1)
    run.steps(3)
    path = save(tmp_path, 3, run.states)
    expected = run.steps(5)

    resumed = Run(optimizer, schedule, seed=9, named=named)
    seed_all(2)
    load(path, resumed.states)
    assert resumed.steps(5) == expected
    assert same(dict(resumed.model.state_dict()), dict(run.model.state_dict()))
    states = [dict(r.states["optimizer"].state_dict()) for r in (run, resumed)]
    assert same(*states)


def test_a_tied_tensor_is_stored_once_and_stays_tied(tmp_path):
    model = Tied()
    path = save(tmp_path, 1, {"model": model})
    shapes = open_folder(path).shapes()
    assert "embed.weight" in shapes
    assert "head.weight" not in shapes
    other = Tied(seed=5)
    load(path, {"model": other})
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_views_that_are_not_one_tensor_are_stored_each(tmp_path):
    base = torch.arange(12.0)
    model = nn.Module()
    model.register_buffer("whole", base)
    model.register_buffer("first", base[:6])
    model.register_buffer("turned", base.view(3, 4).t())
    model.register_buffer("none", torch.empty(0))
    model.register_buffer("nothing", torch.empty(0))
    path = save(tmp_path, 1, {"model": model})
    base.zero_()
    load(path, {"model": model})
    assert torch.equal(model.whole, torch.arange(12.0))
    assert torch.equal(model.turned, torch.arange(12.0).view(3, 4).t())


def test_a_module_whose_tie_was_cut_is_another_model(tmp_path):
    path = save(tmp_path, 1, {"model": Tied()})
    untied = Tied()
    untied.head.weight = nn.Parameter(untied.head.weight.clone())
    with pytest.raises(CheckpointError, match=r"missing in it: head\.weight"):
        load(path, {"model": untied})


def test_moments_follow_their_names_when_parameters_are_reordered(tmp_path):
    run = Run("adamw", named=True)
    run.steps(2)
    path = save(tmp_path, 1, run.states)
    other = Tied(seed=3)
    turned = torch.optim.AdamW(reversed(list(other.parameters())), lr=0.5)
    load(path, {"optimizer": NamedOptimizer(turned, other.named_parameters())})
    theirs = dict(zip(dict(run.model.named_parameters()), run.model.parameters(), strict=True))
    for name, parameter in other.named_parameters():
        expected = run.optimizer.state[theirs[name]]
        assert same(dict(turned.state[parameter]), dict(expected)), name
    assert turned.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_other_groups_are_refused(tmp_path):
    run = Run("two groups", named=True)
    run.steps(1)
    path = save(tmp_path, 1, run.states)
    with pytest.raises(CheckpointError, match="in other groups"):
        load(path, Run("adamw", named=True).states)


def test_a_parameter_without_a_name_is_refused():
    run, other = Run(), Tied()
    with pytest.raises(CheckpointError, match="5 parameters without a name"):
        NamedOptimizer(run.optimizer, other.named_parameters()).state_dict()


def test_a_numpy_number_in_a_state_is_refused_with_advice(tmp_path):
    class Odd:
        def state_dict(self):
            return {"best": np.float64(0.5)}

    with pytest.raises(CheckpointError, match=r"call \.item\(\)"):
        save(tmp_path, 1, {"odd": Odd()})
    assert not list(Path(tmp_path).iterdir())
