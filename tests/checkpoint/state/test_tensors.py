"""States into tensors and a skeleton, and back to exactly what they were."""

import json
import math
from collections import OrderedDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.state.states import join, pointers, split
from surefoot.errors import CheckpointError

from ..sample import same

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
