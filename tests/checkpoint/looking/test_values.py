"""Every difference of two trees is found, with its path."""

import math

from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.looking.values import ValueChange, differences

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.floats() | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy", max_size=2), inner),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_does_not_differ_from_itself(tree):
    assert differences(tree, tree) == []


@given(TREES, TREES)
def test_what_differs_one_way_differs_the_other(a, b):
    mirrored = {"only in A": "only in B", "only in B": "only in A", "differs": "differs"}
    there = {(c.path, c.what) for c in differences(a, b)}
    assert {(c.path, mirrored[c.what]) for c in differences(b, a)} == there
    assert bool(there) == (repr(a) != repr(b) and not alike(a, b))


def alike(a, b):
    """Equality in the words of the module: a bool is no number, nan is nan."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def test_paths_say_where():
    a = {"x": {"y": [1, {"z": 2}]}, "gone": None, "log": [1, 2]}
    b = {"x": {"y": [1, {"z": 3}]}, "new": 4, "log": [1]}
    assert differences(a, b) == [
        ValueChange("x.y[1].z", "differs", 2, 3),
        ValueChange("gone", "only in A", a=None),
        ValueChange("log", "differs", "2 items", "1 item"),
        ValueChange("new", "only in B", b=4),
    ]


def test_a_long_list_of_numbers_is_one_value():
    a, b = list(range(20)), [*range(19), 7]
    assert differences({"r": a}, {"r": b}) == [ValueChange("r", "differs", a, b)]
    assert differences(a, list(a)) == []
    assert len(differences([[n] for n in a], [[n + 1] for n in a])) == 20
