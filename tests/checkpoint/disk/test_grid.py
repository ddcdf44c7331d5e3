"""The grid: the box of every rank by arithmetic, as torch cuts, and back."""

import contextlib
import itertools
import json
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.gridded import part_of
from crash.test_mutations import mutations
from surefoot.checkpoint.disk import grid as grids
from surefoot.checkpoint.disk.grid import Grid, ShardingRule, parse_grid
from surefoot.checkpoint.disk.manifest import dump, parse, parse_list
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import AxisShard, Box, is_covered_once

from .test_manifest import HASH, MANIFEST, raw, sealed

NAMES = ("pp", "dp_replicate", "dp_shard", "tp")


@st.composite
def grids_of_one(draw):
    """A mesh, and the rule of one tensor on it."""
    axes = {name: draw(st.integers(1, 4)) for name in draw(st.permutations(NAMES))}
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    cut = draw(st.lists(st.sampled_from(NAMES[1:]), unique=True)) if prod(shape) and shape else []
    cuts = tuple(AxisShard(axis, draw(st.integers(0, len(shape) - 1))) for axis in cut)
    stage = draw(st.integers(0, axes["pp"] - 1))
    return Grid(axes, [ShardingRule("model/w", "F32", shape, cuts, stage)])


def boxes(grid):
    return {r: b["model/w"] for r in range(grid.size) if (b := grid.boxes_of(r))}


@given(grids_of_one())
@settings(deadline=None)
def test_the_boxes_of_all_ranks_are_those_of_torch_and_cover_the_tensor_once(grid):
    (rule,) = grid.rules
    whole = torch.arange(prod(rule.shape)).reshape(rule.shape)
    found = boxes(grid)
    assert is_covered_once(Box.whole(rule.shape), list(found.values()))
    cuts = [(cut.axis, cut.dim) for cut in rule.cuts]
    coordinates = itertools.product(*(range(size) for size in grid.axes.values()))
    for rank, at in enumerate(coordinates):
        place = dict(zip(grid.axes, at, strict=True))
        is_here = place["pp"] == rule.stage
        part = part_of(whole, cuts, grid.axes, place) if is_here else None
        if part is None or (not part.numel() and whole.numel()):
            assert rank not in found
        else:
            assert torch.equal(part, whole[found[rank].slices_in(Box.whole(rule.shape))])


@given(grids_of_one(), st.data())
@settings(deadline=None)
def test_the_ranks_of_a_box_are_those_that_have_elements_of_it(grid, data):
    (rule,) = grid.rules
    start = tuple(data.draw(st.integers(0, n)) for n in rule.shape)
    room = [n - a for a, n in zip(start, rule.shape, strict=True)]
    box = Box(start, tuple(data.draw(st.integers(0, n)) for n in room))
    expected = {r: b for r, b in boxes(grid).items() if b & box or not prod(rule.shape)}
    found = list(grid.ranks_of(rule, box))
    assert dict(found) == expected
    assert len(found) == len(expected)


RULE = {"tensor": "model/r", "dtype": "F32", "shape": [4, 2], "cuts": [["dp", 0]], "stage": 0}


def gridded(*rules, **changes):
    """A manifest of two ranks with these rules."""
    lists = [f"rank_{rank:05d}/hashes.json" for rank in range(2)]
    files = {**raw()["files"], **dict.fromkeys(lists, 2)}
    hashes = {**raw()["hashes"], **dict.fromkeys(lists, HASH)}
    mesh = {"mesh": {"dp": 2}, "axes": ["dp"], "world_size": 2}
    content = {"files": files, "hashes": hashes, **mesh, "version": "1.1", "layout": "distributed"}
    return {**raw(), **content, "rules": list(rules or [RULE]), **changes}


def test_a_manifest_with_rules_is_read_as_it_was_written():
    manifest = parse(sealed(gridded()), "x")
    rule = ShardingRule("model/r", "F32", (4, 2), (AxisShard("dp", 0),))
    assert manifest.grid == Grid({"dp": 2}, [rule])
    assert parse(dump(manifest), "x") == manifest
    assert json.loads(dump(manifest))["version"] == "1.1"
    assert manifest.roles == ("model",)
    assert set(manifest.tensors("model")) == {"w", "r"}
    assert manifest.tensors("model")["r"].shape == (4, 2)


def test_a_manifest_without_rules_is_still_of_version_1_0():
    assert json.loads(dump(MANIFEST))["version"] == "1.0"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"axes": None}, "axes cannot be"),
        ({"axes": ["dp", "dp"]}, "axes cannot be"),
        ({"axes": [["dp"]]}, "axes cannot be"),
        ({"axes": ["tp"]}, "axes are tp, but mesh has dp"),
        ({"axes": []}, "axes are , but mesh has dp"),
        ({"mesh": {"dp": 0}}, "mesh cannot be"),
        ({"mesh": {"dp": 70_000}}, "mesh cannot be"),
        ({"mesh": {"dp": 3}}, "3 ranks in layout distributed of 2"),
        ({"world_size": 3}, "2 ranks in layout distributed of 3"),
        ({"layout": "full"}, "2 ranks in layout full of 2"),
        ({"rules": {}}, "rules cannot be"),
        ({"rules": [5]}, "rule 0: expected the fields"),
        ({"rules": [{**RULE, "hash": HASH}]}, "rule 0: expected the fields"),
        ({"rules": [{**RULE, "tensor": 5}]}, "no tensor '5'"),
        ({"rules": [{**RULE, "dtype": "F31"}]}, "no tensor 'model/r' of 'F31'"),
        ({"rules": [{**RULE, "dtype": []}]}, "no tensor"),
        ({"rules": [{**RULE, "shape": [-1, 2]}]}, "expected sizes"),
        ({"rules": [{**RULE, "shape": [2**40, 2**40]}]}, "larger than any memory"),
        ({"rules": [{**RULE, "stage": 1}]}, "the mesh has no stage 1"),
        ({"rules": [{**RULE, "stage": True}]}, "the mesh has no stage True"),
        ({"rules": [{**RULE, "cuts": {}}]}, "cuts cannot be"),
        ({"rules": [{**RULE, "cuts": [["dp", 2]]}]}, "cuts cannot be"),
        ({"rules": [{**RULE, "cuts": [["dp", True]]}]}, "cuts cannot be"),
        ({"rules": [{**RULE, "cuts": [["tp", 0]]}]}, "cuts cannot be"),
        ({"rules": [{**RULE, "cuts": [[["dp"], 0]]}]}, "cuts cannot be"),
        ({"rules": [{**RULE, "cuts": [["dp", 0], ["dp", 1]]}]}, "one axis shards it twice"),
        ({"rules": [{**RULE, "shape": [0, 2]}]}, "cuts cannot be"),
        ({"rules": [RULE, RULE]}, "a tensor has two rules"),
        ({"rules": [{**RULE, "tensor": "model/w"}]}, "'model/w' has a rule and pieces"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rules_that_lie_are_refused(changes, why):
    with pytest.raises(CheckpointError, match=why):
        parse(sealed(gridded(**changes)), "x")


GRID = parse(sealed(gridded({**RULE, "shape": [2 << 14, 2]})), "x").grid
ENTRY = [HASH] * 3  # 128 KiB on each rank: a hash and those of two blocks


@given(mutations({name: gridded()[name] for name in ("axes", "mesh", "rules", "world_size")}))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_rules_are_read_or_refused(tree):
    changed = tree if isinstance(tree, dict) else {"rules": tree}
    with contextlib.suppress(CheckpointError):
        manifest = parse(sealed(gridded(**changed)), "x")
        assert parse(dump(manifest), "x") == manifest
        for rank in range(min(manifest.grid.size, 4)):
            manifest.grid.boxes_of(rank)


@given(mutations({"a.safetensors": {"model/r": [HASH] * 3}}))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_hash_list_is_read_or_refused(tree):
    with contextlib.suppress(CheckpointError):
        listed = parse_list(json.dumps(tree).encode(), GRID, 1, "x")
        assert [*listed] == ["model/r"]


def test_tensors_are_not_cut_along_the_axis_of_stages():
    with pytest.raises(CheckpointError, match="cuts cannot be"):
        parse_grid({"axes": ["pp"], "rules": [{**RULE, "cuts": [["pp", 0]]}]}, {"pp": 2}, "x")


def test_every_rank_must_have_a_hash_list():
    whole = gridded()
    name = "rank_00001/hashes.json"
    del whole["files"][name], whole["hashes"][name]
    with pytest.raises(CheckpointError, match=r"rank_00001/hashes\.json, the hash list of a rank"):
        parse(sealed(whole), "x")


def test_a_hash_list_is_read_as_it_was_written():
    listed = parse_list(json.dumps({"a.safetensors": {"model/r": ENTRY}}).encode(), GRID, 1, "x")
    assert listed["model/r"].box == Box((1 << 14, 0), (1 << 14, 2))
    assert listed["model/r"].blocks == (HASH, HASH)
    assert [listed["model/r"].file, listed["model/r"].hash] == ["rank_00001/a.safetensors", HASH]


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ([], "expected a JSON object"),
        ({}, "the box of 'model/r' of rank 1 is missing"),
        ({"a.safetensors": []}, "must map tensors to hashes"),
        ({"a.safetensors": {"model/r": HASH}}, "'model/r' must have 3 hashes"),
        ({"a.safetensors": {"model/r": []}}, "'model/r' must have 3 hashes"),
        ({"a.safetensors": {"model/r": [HASH[1:]]}}, "'model/r' must have 3 hashes"),
        ({"a.safetensors": {"model/r": [HASH, 5]}}, "'model/r' must have 3 hashes"),
        ({"a.safetensors": {"model/r": [HASH]}}, "'model/r' must have 3 hashes"),
        ({"a.safetensors": {"model/r": ENTRY, "model/x": [HASH]}}, "'model/x' is not of rank 1"),
        ({"a": {"model/r": ENTRY}, "b": {"model/r": ENTRY}}, "'model/r' is in two files"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_hash_list_that_lies_is_refused(listed, why):
    with pytest.raises(CheckpointError, match=why):
        parse_list(json.dumps(listed).encode(), GRID, 1, "x")


def test_only_what_is_larger_than_a_block_has_hashes_of_blocks():
    assert [grids.num_blocks(n) for n in (0, 1 << 16, (1 << 16) + 1, 1 << 17)] == [0, 0, 2, 2]
