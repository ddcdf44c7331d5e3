"""The boxes that a mesh cuts."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.parallel import sharding
from surefoot.parallel.sharding import AXES, Box, Mesh, is_covered_once


def test_the_axes_of_a_mesh_are_those_of_a_run():
    assert Mesh(2, 4).size == 8
    assert Mesh(2, 4).axes == {"dp_replicate": 2, "dp_shard": 4, "tp": 1}
    assert Mesh(1, 3, 2).size == 6
    assert Mesh(1, 3, 2).axes == {"dp_replicate": 1, "dp_shard": 3, "tp": 2}
    assert Mesh().axes == {}


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 12), st.integers(1, 3))
def test_the_boxes_of_a_copy_are_torch_chunks_and_all_of_the_tensor(shape, shards, copies):
    shape, mesh = tuple(shape), Mesh(copies, shards)
    found = list(mesh.boxes(shape))
    assert is_covered_once(Box.whole(shape), [box for _, box in found])
    if not shape or 0 in shape:
        assert found == [((0,), Box.whole(shape))]
        return
    chunks = torch.arange(shape[0]).chunk(shards)
    assert [box.shape[0] for _, box in found] == [len(chunk) for chunk in chunks]
    for i, (ranks, _) in enumerate(found):
        assert list(ranks) == [copy * shards + i for copy in range(copies)]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 2))
def test_with_tp_every_rank_has_the_rows_of_a_run(length, shards, parts, copies):
    mesh, rows = Mesh(copies, shards, parts), torch.arange(length)
    found = list(mesh.boxes((length, 3)))
    assert is_covered_once(Box.whole((length, 3)), [box for _, box in found])
    if not length:
        return
    for ranks, box in found:
        assert len(ranks) == copies
        for rank in ranks:
            shard, part = divmod(rank % (shards * parts), parts)
            expected = rows.chunk(parts)[part].chunk(shards)[shard]
            assert rows[box.start[0] : box.stop[0]].tolist() == expected.tolist()


@pytest.mark.parametrize("order", [*itertools.permutations(AXES)], ids="-".join)
def test_in_any_order_of_the_axes_a_box_has_the_ranks_at_its_place(order, monkeypatch):
    monkeypatch.setattr(sharding, "AXES", order)
    mesh = Mesh(dp_replicate=2, dp_shard=3, tp=2)
    assert [*mesh.axes] == [axis for axis in order if axis != "pp"]
    shape = [*mesh.axes.values()]
    places = dict(zip(mesh.axes, np.indices(shape), strict=True))
    for ranks, box in mesh.boxes((12, 3)):
        rows = np.arange(12).reshape(2, 3, 2)  # by tp, then by dp_shard
        at = [np.unravel_index(rank, shape) for rank in ranks]
        expected = {tuple(rows[places["tp"][i], places["dp_shard"][i]]) for i in at}
        assert expected == {tuple(range(box.start[0], box.stop[0]))}
        assert {places["dp_replicate"][i] for i in at} == {0, 1}
