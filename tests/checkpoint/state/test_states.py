"""What torch has is saved as it is: modules, tied or not, optimizers, schedules, generators."""

import json
import math
import random
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from surefoot.checkpoint.state.states import join, pointers, split

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


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters())
    | st.integers(0, 9).map(lambda n: torch.arange(n, dtype=torch.int16))
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def through_json(tree):
    tensors, skeleton = split(tree, "x")
    return join(json.loads(json.dumps(skeleton, allow_nan=False)), tensors, "x")


@given(TREES)
def test_any_state_comes_back_exactly(tree):
    try:
        found = through_json(tree)
    except CheckpointError as error:
        assert "would both be called" in str(error)
    else:
        assert same(found, tree)


@pytest.mark.parametrize(
    "value",
    [
        0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1.0, 1,
        2**53, 2**53 + 1, -(2**64), 10**5000, True, False, None, "", "\x00\ud800", [], (), {},
        {"$tensor": 1}, {"$": {}}, {1: {2: 3}, "1": 4}, {(1, "a"): (None,)}, {True: 1, "x": 2},
        {1.5: 2, None: 3}, [[], [()], ({},)], (3, tuple(range(625)), None),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_values_that_json_alone_would_change(value):
    assert same(through_json({"state": value}), {"state": value})


def test_plain_states_are_plain_json():
    _, skeleton = split({"epoch": 1, "rows": [1, 2.5, None, "x"]}, "x")
    assert skeleton == {"epoch": 1, "rows": [1, 2.5, None, "x"]}


def test_tensors_are_named_by_their_path():
    t = torch.ones(1)
    tensors, skeleton = split({"model.norm.weight": {"exp_avg": t}, "list": [0, (t,)]}, "x")
    assert list(tensors) == ["model.norm.weight.exp_avg", "list.1.0"] == pointers(skeleton)
    assert skeleton["list"] == [0, {"$tuple": [{"$tensor": "list.1.0"}]}]


def test_an_ordered_dict_keeps_its_order():
    tree = OrderedDict([("b", 1), ("a", 2)])
    assert list(through_json(tree)) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.float64(1.5), r"numpy.float64; call .item\(\) on it first"),
        (np.int64(1), r"numpy.int64; call .item\(\)"),
        (np.zeros(2), r"numpy.ndarray"),
        (IntEnum("E", "A").A, "cannot store a"),
        (namedtuple("Point", "x")(1), "cannot store a"),
        (torch.Size([1]), "cannot store a torch.Size"),
        (b"bytes", "cannot store a builtins.bytes"),
        ({1, 2}, "cannot store a builtins.set"),
        (torch.float32, "cannot store a torch.dtype"),
        (lambda: 0, "cannot store a builtins.function"),
        ({b"key": 1}, "cannot store a builtins.bytes"),
        ({np.int64(3): 1}, "numpy.int64"),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_what_would_not_come_back_is_refused(value, why):
    with pytest.raises(CheckpointError, match=f"x.*{why}"):
        split({"where": value}, "x")


def test_the_message_says_where_it_is():
    with pytest.raises(CheckpointError, match=r"optimizer\.groups\.0\.lr: cannot store a numpy"):
        split({"groups": [{"lr": np.float32(1)}]}, "optimizer")


def test_a_state_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested deeper"):
        split(loop, "x")


def test_two_tensors_of_one_name_are_refused():
    t = torch.ones(1)
    with pytest.raises(CheckpointError, match=r"would both be called 'a\.b'"):
        split({"a": {"b": t}, "a.b": t}, "x")


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "nowhere"}, {"$tensor": 5}, {"$tensor": ["a"]}, {"$tuple": 3},
        {"$dict": [[1]]}, {"$dict": 1}, {"$dict": [[[1], 2]]}, {"$dict": [[{}, 2]]},
        {"$int": "12z"}, {"$int": 5}, {"$float": "1"}, {"$float": []},
        {"$nothing": 1}, {"$tensor": "t", "more": 1}, {"$": 0}, {"a": {"$b": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_a_skeleton_that_is_none_is_refused(skeleton):
    with pytest.raises(CheckpointError, match="x: "):
        join(skeleton, {"t": torch.ones(1)}, "x")
