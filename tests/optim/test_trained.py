"""The optimizer of the parameters trained now: rebuilt when they change, its state of any shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import surefoot.checkpoint as ckpt
from surefoot.errors import CheckpointError, RecipeError
from surefoot.optim import OPTIMIZERS
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.optimizer import Optimizer
from surefoot.optim.state_tensor import LIKE_PARAMETER, SCALAR, StateTensor, reduced
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.sharding import AxisShard


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """torch's Adafactor (arXiv:1804.04235): row and column factors in place of second moments."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "row_var": StateTensor(reduced(-1).shape, None),  # its in-place square fails on a DTensor
        "col_var": StateTensor(reduced(-2).shape, None),
        "variance": LIKE_PARAMETER,
    }

    def build(self, named, layouts=None):
        return torch.optim.Adafactor(self.groups(named, {}), lr=self.learning_rate)


def parameters():
    torch.manual_seed(0)
    shapes = {"a.weight": (3, 4), "a.bias": (4,), "b.weight": (2, 5, 3), "c.scale": ()}
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def alternating(step, names):
    return [name for name in names if name.startswith("a." if step // 2 % 2 == 0 else "b.")]


def train(made, steps):
    for step in steps:
        optimizer = made.at(step)
        for name, parameter in made.named.items():
            assert parameter.grad is None
            if parameter.requires_grad:
                parameter.grad = torch.sin(parameter.detach() * (step + 1) + len(name))
        optimizer.step()
        optimizer.zero_grad()


VARIANTS = {**OPTIMIZERS, "factored": Adafactor}


@pytest.mark.parametrize("trainable", [alternating, lambda step, names: names])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_optimizer_saved_at_any_step_goes_on_to_the_same_bits(name, trainable, tmp_path):
    whole, cut = (
        TrainedParameters(VARIANTS[name](learning_rate=0.1), parameters(), trainable)
        for _ in range(2)
    )
    train(whole, range(7))
    for saved in (1, 2, 3):
        train(cut, range(saved - 1, saved))
        model = torch.nn.ParameterDict({k.replace(".", "_"): p for k, p in cut.named.items()})
        folder = ckpt.save(tmp_path, saved, {"model": model, "optimizer": cut})
        other = TrainedParameters(VARIANTS[name](learning_rate=0.1), parameters(), trainable)
        renamed = {k.replace(".", "_"): p for k, p in other.named.items()}
        ckpt.load(folder, {"model": torch.nn.ParameterDict(renamed), "optimizer": other})
        other.check(saved)
        train(other, range(saved, 7))
        for key, parameter in other.named.items():
            assert torch.equal(parameter, whole.named[key]), (saved, key)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_parameter_that_has_had_no_gradient_yet_is_resumed_without_a_state(name, tmp_path):
    def step(made, idle):
        for key, parameter in made.named.items():
            parameter.grad = None if key in idle else torch.sin(parameter.detach())
        made.optimizer.step()

    whole, cut, other = (
        TrainedParameters(VARIANTS[name](learning_rate=0.1), parameters()) for _ in range(3)
    )
    for made in (whole, cut):
        step(made, {"a.bias", "b.weight"})
    model = torch.nn.ParameterDict({k.replace(".", "_"): p for k, p in cut.named.items()})
    folder = ckpt.save(tmp_path, 1, {"model": model, "optimizer": cut})
    renamed = {k.replace(".", "_"): p for k, p in other.named.items()}
    ckpt.load(folder, {"model": torch.nn.ParameterDict(renamed), "optimizer": other})
    other.check(1)
    for idle in ({"b.weight"}, {"b.weight"}):  # the bias gets its first one only now
        step(whole, idle)
        step(other, idle)
    for key, parameter in other.named.items():
        assert torch.equal(parameter, whole.named[key]), key
    assert torch.equal(other.named["b.weight"], parameters()["b.weight"])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_state_has_the_declared_tensors_in_the_declared_shapes(name):
    optim = VARIANTS[name](learning_rate=0.1)
    made = TrainedParameters(optim, parameters())
    train(made, range(2))
    seen = set()
    for parameter, state in made.state_dict().items():
        shape = tuple(made.named[parameter].shape)
        for key, tensor in state.items():
            assert tuple(tensor.shape) == optim.state_tensors[key].shape(shape), (parameter, key)
            seen.add(key)
    assert seen == optim.state_tensors.keys()


def test_others_are_frozen_and_the_old_state_is_gone():
    made = TrainedParameters(AdamW(), parameters(), alternating)
    train(made, range(2))
    assert made.state_dict().keys() == {"a.weight", "a.bias"}
    for parameter in made.named.values():
        parameter.grad = torch.ones_like(parameter)
    old = made.optimizer
    assert made.at(2) is not old
    assert {n for n, p in made.named.items() if p.requires_grad} == {"b.weight"}
    assert not any(p.grad is not None for p in made.named.values()) and not made.state_dict()
    assert made.at(3) is made.at(2)


def test_a_state_is_of_the_parameters_that_were_trained_last():
    made = TrainedParameters(AdamW(), parameters(), alternating)
    train(made, range(3))
    state = made.state_dict()
    for step, is_right in ((2, False), (3, True), (4, True), (5, False)):
        other = TrainedParameters(AdamW(), parameters(), alternating)
        other.load_state_dict(state)
        if is_right:
            other.check(step)
        else:
            with pytest.raises(CheckpointError, match="other parameters: 1 unknown, 2 missing"):
                other.at(step)
    with pytest.raises(CheckpointError, match="other parameters"):
        made.load_state_dict({"d.weight": state["b.weight"]})


def test_an_empty_state_forgets_the_present_one():
    made = TrainedParameters(AdamW(), parameters())
    train(made, range(1))
    made.load_state_dict({})
    assert not made.state_dict()


def test_a_rank_of_a_pipeline_refuses_a_change_before_the_first_step():
    named = parameters()
    every = (*named, "d.weight")  # which another rank has
    TrainedParameters(AdamW(), named, names=every)
    with pytest.raises(RecipeError, match=r"parallel\.pp"):
        TrainedParameters(AdamW(), named, alternating, names=every)


def test_factors_have_their_own_cuts():
    cuts = (AxisShard("tp", 0), AxisShard("dp_shard", 1))
    assert reduced(-1).shape((4, 6)) == (4, 1) and reduced(-2).shape((4, 6)) == (1, 6)
    assert reduced(-1).cuts((4, 6), cuts) == cuts[:1]
    assert reduced(-2).cuts((4, 6), cuts) == cuts[1:]
