"""What differs, and by how much, agrees with torch in 64 bits."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from damage import flip
from surefoot.checkpoint.looking.diff import (
    ValueChange,
    compare_tensors,
    compare_values,
    differences,
)
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import CheckpointError
from surefoot.storage.files import digest

from ..disk.test_manifest import sealed
from ..sample import Holder, sample_states


def folder_of(path, **tensors):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def compare(tmp_path, a, b):
    """The one change between two models of one tensor."""
    (change,) = compare_tensors(folder_of(tmp_path / "a", x=a), folder_of(tmp_path / "b", x=b))
    return change


def test_figures_are_those_of_torch(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.checkpoint.looking.diff.BLOCK", 7)
    a, b = torch.randn(9, 5, dtype=torch.float32), torch.randn(9, 5)
    b[0] = a[0]
    change = compare(tmp_path, a, b)
    apart = b.double() - a.double()
    assert change.verdict == "differs" and change.role == "model"
    assert change.figures.num_different == 40
    assert change.figures.max_absolute == apart.abs().max().item()
    assert change.figures.norm == pytest.approx(apart.norm().item(), rel=1e-12)
    assert change.figures.norm_a == pytest.approx(a.double().norm().item(), rel=1e-12)
    assert change.figures.norm_b == pytest.approx(b.double().norm().item(), rel=1e-12)
    larger = max(a.double().norm(), b.double().norm())
    assert change.figures.relative == pytest.approx((apart.norm() / larger).item())


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf])


@given(st.lists(st.tuples(SPECIAL, SPECIAL), min_size=1, max_size=6))
def test_special_values_are_compared_as_numbers(tmp_path_factory, pairs):
    a, b = (torch.tensor(values) for values in zip(*pairs, strict=True))
    change = compare(tmp_path_factory.mktemp("x"), a, b)
    same = [x == y or (math.isnan(x) and math.isnan(y)) for x, y in pairs]
    is_bitwise = torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert change.verdict == ("equal" if is_bitwise else "differs")
    if is_bitwise:
        return
    assert change.figures.num_different == same.count(False)
    jumps = [
        not ok and not (math.isfinite(x) and math.isfinite(y))
        for (x, y), ok in zip(pairs, same, strict=True)
    ]
    assert (change.figures.max_absolute == math.inf) == any(jumps)
    assert math.isfinite(change.figures.relative)


def test_a_difference_that_overflows_is_infinite(tmp_path):
    large = torch.tensor([1.7e308], dtype=torch.float64)
    figures = compare(tmp_path, large, -large).figures
    assert figures.max_absolute == figures.norm == math.inf and figures.norm_a == 1.7e308


def test_other_types_and_shapes_are_told(tmp_path):
    values = torch.randn(4, 3)
    change = compare(tmp_path, values, values.bfloat16())
    assert change.verdict == "other type" and change.types == ("F32", "BF16")
    expected = (values.bfloat16().double() - values.double()).abs().max().item()
    assert change.figures.max_absolute == expected
    change = compare(tmp_path, values, values.T.contiguous())
    assert change.verdict == "other shape" and change.shapes == ((4, 3), (3, 4))
    assert change.figures is None
    assert compare(tmp_path, values[0], values[0] + 0j).figures is None
    assert compare(tmp_path, torch.empty(0, 3), torch.empty(0, 3)).verdict == "equal"


def test_tensors_of_one_side_only(tmp_path):
    a = folder_of(tmp_path / "a", x=torch.ones(1), y=torch.ones(1))
    b = folder_of(tmp_path / "b", y=torch.ones(1), z=torch.ones(2))
    found = {change.name: change.verdict for change in compare_tensors(a, b)}
    assert found == {"model/x": "only in A", "model/y": "equal", "model/z": "only in B"}


def test_equal_hashes_spare_the_reading(tmp_path):
    a, b = (save(tmp_path / name, 1, sample_states()) for name in "ab")
    for name in ("model", "optimizer", "state"):
        path = b / f"{name}.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little") + 8
        path.write_bytes(data[:length] + bytes(len(data) - length))  # values are gone
    assert {change.verdict for change in compare_tensors(a, b)} == {"equal"}


def test_all_roles_are_compared_and_progress_is_told(tmp_path):
    a, b = (save(tmp_path, n, sample_states(seed=n)) for n in (1, 2))
    told = []
    changes = list(compare_tensors(a, b, progress=told.append))
    assert {change.role for change in changes} == {"model", "optimizer", "state"}
    assert sum(told) == 2 * sum(t.numel() * t.element_size() for t in _tensors(sample_states()))
    only = list(compare_tensors(a, b, roles=["optimizer"]))
    assert {change.role for change in only} == {"optimizer"}
    assert "optimizer/model.norm.weight.exp_avg" in {change.name for change in only}


def _tensors(states):
    yield from states["model"].state.values()
    for name, moments in states["optimizer"].state.items():
        yield from moments.values() if name != "groups" else ()
    yield states["random"].state["torch"]


def test_ours_is_compared_with_any_layout(tmp_path):
    ours = save(tmp_path, 1, sample_states())
    theirs = folder_of(tmp_path / "hf", **sample_states()["model"].state)
    found = {change.role: change.verdict for change in compare_tensors(ours, theirs)}
    assert found == {"model": "equal", "optimizer": "only in A", "state": "only in A"}
    assert compare_values(ours, theirs) == {"config": []}


def test_values_are_compared_by_part(tmp_path):
    states = sample_states()
    a = save(tmp_path / "a", 1, states, companions={"config.json": b'{"n": 1}'})
    states["optimizer"].state["groups"][0]["lr"] = 2e-4
    states["loader"] = Holder({"epoch": 2, "index": 12345, "seed": 2**63})
    del states["optimizer"].state["model.norm.weight"]
    b = save(tmp_path / "b", 2, states, companions={"config.json": b'{"n": 2}'})
    found = {
        part: [(change.path, change.a, change.b) for change in changes]
        for part, changes in compare_values(a, b).items()
    }
    assert found == {
        "config": [("config.json.n", 1, 2)],
        "optimizer": [("optimizer.groups[0].lr", 1e-4, 2e-4)],  # tensors are told as tensors
        "state": [("loader.epoch", 1, 2)],
        "versions": [],
    }


def test_what_the_trainer_logged_is_compared(tmp_path):
    a, b = (folder_of(tmp_path / name, x=torch.ones(1)) for name in "ab")
    (a / "trainer_state.json").write_text('{"epoch": 1.0, "loss": NaN}')
    (b / "trainer_state.json").write_text('{"epoch": 2.0, "loss": NaN}')
    (change,) = compare_values(a, b)["state"]
    assert (change.path, change.a, change.b) == ("trainer_state.epoch", 1.0, 2.0)


def test_what_is_damaged_is_an_error(tmp_path):
    a, b = (save(tmp_path, n, sample_states(seed=n)) for n in (1, 2))
    flip(b / "model.safetensors")
    with pytest.raises(CheckpointError):
        list(compare_tensors(a, b))
    (a / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError):
        compare_values(a, b)
    with pytest.raises(CheckpointError, match="contains no weights"):
        list(compare_tensors(tmp_path, b))


def test_a_state_file_that_is_no_object_is_an_error(tmp_path):
    sound = save(tmp_path / "a", 1, sample_states())
    odd = save(tmp_path / "b", 1, sample_states())
    text = b'{"$tuple": [1, 2]}'
    content = json.loads((odd / "manifest.json").read_bytes())
    (odd / "state.json").write_bytes(text)
    content["files"]["state.json"] = len(text)
    content["hashes"]["state.json"] = digest(text)
    (odd / "manifest.json").write_bytes(sealed(content))
    for pair in ((sound, odd), (odd, sound)):
        with pytest.raises(CheckpointError, match=r"b/checkpoint-1/state\.json: expected a state"):
            compare_values(*pair)


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
