"""Meshes as a user writes them, and the boxes they cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import CheckpointError
from surefoot.geometry.box import Box, is_covered_once
from surefoot.geometry.mesh import Mesh, parse_mesh


def test_a_mesh_is_read_in_any_order():
    assert parse_mesh("dp_shard=4") == Mesh(1, 4)
    assert parse_mesh("dp_shard=4, dp_replicate=2") == parse_mesh("dp_replicate=2,dp_shard=4")
    assert Mesh(2, 4).size == 8
    assert Mesh(2, 4).axes == {"dp_replicate": 2, "dp_shard": 4, "tp": 1}
    assert parse_mesh("tp=2,dp_shard=3") == Mesh(1, 3, 2)
    assert Mesh(1, 3, 2).size == 6
    assert Mesh(1, 3, 2).axes == {"dp_replicate": 1, "dp_shard": 3, "tp": 2}
    assert Mesh().axes == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pp=2", "dp_replicate, dp_shard and tp, not 'pp'; for example dp_shard=4,tp=2"),
        ("dp_shards=2", "did you mean dp_shard?"),
        ("", "not ''"),
        ("dp_shard", "must be a whole number, got ''"),
        ("dp_shard=two", "got 'two'"),
        ("dp_shard=-1", "got '-1'"),
        ("dp_shard=0", "must be at least 1, got 0"),
        ("dp_shard=1.5", "got '1.5'"),
        ("dp_shard=²", "whole number"),
        ("dp_shard=2,dp_shard=2", "dp_shard occurs twice"),
        ("dp_shard=999999", "999,999 processes are more than 65,536"),
        ("dp_shard=9999999999999999999999", "whole number"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(text, told):
    with pytest.raises(CheckpointError) as error:
        parse_mesh(text)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


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
