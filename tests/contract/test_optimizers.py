"""What every optimizer owes every method: a state as declared, and exact resume."""

import pytest
import torch

import surefoot.checkpoint as ckpt
import tiny
from surefoot.methods import METHODS
from surefoot.network.parameter_names import names_by_part
from surefoot.optim import OPTIMIZERS
from surefoot.optim.schedules import SCHEDULES
from surefoot.optim.trained import TrainedParameters


class Run:
    """A tiny model with a method and an optimizer."""

    def __init__(self, method, optim):
        torch.manual_seed(0)
        self.method, self.optim, inner = METHODS[method](), OPTIMIZERS[optim](), tiny.model()
        self.model = self.method.apply(inner)
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        parts = names_by_part(self.model, inner, {n: n for n, _ in self.model.named_parameters()})
        blocks = self.method.trainable(parts, 0)
        self.trained = TrainedParameters(self.optim, named, blocks.trainable)
        self.states = {
            "model": self.method.weights(self.model, inner),
            "optimizer": self.trained,
        }

    def train(self, steps):
        for step in steps:
            optimizer = self.trained.at(step)
            ids = torch.arange(3, 9).roll(step)[None]
            self.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_optimizer_of_a_method_resumes_to_the_same_bits(optim, method, tmp_path):
    run, other = Run(method, optim), Run(method, optim)
    run.train(range(2))
    kind = run.states["model"].kind
    folder = ckpt.save(tmp_path, 2, run.states, kind=kind)
    run.train(range(2, 4))
    ckpt.load(folder, other.states)
    other.trained.check(2)
    other.train(range(2, 4))
    for name, parameter in run.trained.named.items():
        assert torch.equal(parameter, other.trained.named[name]), name


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_optimizer_declares_its_state(optim):
    run = Run("full", optim)
    run.train(range(1))
    declared = run.optim.state_tensors
    for name, state in run.trained.state_dict().items():
        shape = tuple(run.trained.named[name].shape)
        assert {key: tuple(t.shape) for key, t in state.items()} == {
            key: declared[key].shape(shape) for key in state
        }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_optimizer_takes_every_schedule(optim, schedule):
    made = OPTIMIZERS[optim](learning_rate=0.1, schedule=schedule, warmup_ratio=0.5)
    factors = [made.schedule_over(10).factor(step) for step in range(10)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(0 <= factor <= 1 for factor in factors)
    assert made.trainer_arguments().keys().isdisjoint({"learning_rate", "warmup_steps"})
    with pytest.raises(ValueError, match="warmup_ratio"):
        OPTIMIZERS[optim](warmup_ratio=2.0)
