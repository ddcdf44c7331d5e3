"""Meshes as a user writes them."""

import pytest

from surefoot.cli.targets import parse_mesh
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Mesh


def test_a_mesh_is_read_in_any_order():
    assert parse_mesh("dp_shard=4") == Mesh(1, 4)
    assert parse_mesh("dp_shard=4, dp_replicate=2") == parse_mesh("dp_replicate=2,dp_shard=4")
    assert parse_mesh("tp=2,dp_shard=3") == Mesh(1, 3, 2)


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
        ("dp_shard=999999", "mesh: 999,999 ranks are more than 65,536"),
        ("dp_shard=9999999999999999999999", "whole number"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(text, told):
    with pytest.raises(CheckpointError) as error:
        parse_mesh(text)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
