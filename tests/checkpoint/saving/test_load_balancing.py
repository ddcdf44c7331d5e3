"""Every element is written exactly once, and all write equally much."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.disk.tensorfile import ITEM_SIZES, num_bytes
from surefoot.checkpoint.saving._balancing import LocalTensor, balance
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import AxisShard, Box, local_offset_and_shape

MEBI = 1 << 20


def on_mesh(axes, tensors):
    """What each rank of a mesh holds of ``tensors``: name -> (type, shape, cuts)."""
    found = []
    for index in product(*map(range, axes.values())):
        place = dict(zip(axes, index, strict=True))
        found.append(
            {
                name: LocalTensor(
                    dtype, shape, Box(*local_offset_and_shape(shape, cuts, axes, place))
                )
                for name, (dtype, shape, cuts) in tensors.items()
            }
        )
    return found


def written(holdings, shares):
    """Bytes that each rank writes."""
    return [
        sum(num_bytes(holdings[rank][name].dtype, box.shape) for name, box in share.items())
        for rank, share in enumerate(shares)
    ]


def unique(holdings):
    """Bytes of the different tensors."""
    tensors = {name: (h.dtype, h.shape) for rank in holdings for name, h in rank.items()}
    return sum(num_bytes(*tensor) for tensor in tensors.values())


def assert_written_once(holdings, shares):
    for name in {name for rank in holdings for name in rank}:
        shape = next(rank[name].shape for rank in holdings if name in rank)
        count, writers = np.zeros(shape, int), 0
        for rank, share in enumerate(shares):
            if name in share:
                assert share[name] in holdings[rank][name].box or not count.size
                count[share[name].slices_in(Box.whole(shape))] += 1
                writers += 1
        assert (count == 1).all(), name
        assert writers == 1 or count.size, name


def assert_even(holdings):
    shares = balance(holdings)
    assert_written_once(holdings, shares)
    loads = written(holdings, shares)
    assert max(loads) <= 1.1 * sum(loads) / len(loads)
    assert sum(loads) <= 1.01 * unique(holdings)


def layers(cuts, small=(), hidden=64, count=6):
    """The shapes of a transformer with their moments, and matrices that tp cuts by columns."""
    found = {}
    for layer in range(count):
        for slot, dtype in (("w", "BF16"), ("m", "F32"), ("v", "F32")):
            found |= {
                f"{layer}.q.{slot}": (dtype, (hidden, hidden), cuts),
                f"{layer}.o.{slot}": (dtype, (hidden, hidden), columns(cuts)),
                f"{layer}.up.{slot}": (dtype, (4 * hidden, hidden), cuts),
                f"{layer}.down.{slot}": (dtype, (hidden, 4 * hidden), columns(cuts)),
                f"{layer}.norm.{slot}": (dtype, (hidden,), small),
            }
    return found | {"step": ("F32", (), ()), "embed": ("F32", (1000, hidden), cuts)}


def columns(cuts):
    return tuple(AxisShard(cut.axis, 1) if cut.axis == "tp" else cut for cut in cuts)


TP, SHARD = AxisShard("tp", 0), AxisShard("dp_shard", 0)


@pytest.mark.parametrize("replicas", [2, 3, 8, 64])
def test_plain_data_parallel_copies_are_spread_evenly(replicas):
    assert_even(on_mesh({"dp_replicate": replicas}, layers(())))


@pytest.mark.parametrize("axes", [(2, 2), (4, 2), (2, 8), (3, 5)])
def test_copies_of_shards_are_spread_evenly(axes):
    axes = dict(zip(("dp_replicate", "dp_shard"), axes, strict=True))
    assert_even(on_mesh(axes, layers((SHARD,), (SHARD,), hidden=240)))


@pytest.mark.parametrize("axes", [(1, 2), (2, 4), (4, 2), (2, 2)])
def test_what_tensor_parallel_processes_have_in_common_is_spread_evenly(axes):
    axes = dict(zip(("dp_shard", "tp"), axes, strict=True))
    replicated = layers((TP, SHARD), (SHARD,)) | {"head": ("F32", (4000, 64), (SHARD,))}
    assert_even(on_mesh(axes, replicated))


def test_three_axes_are_spread_evenly():
    axes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert_even(on_mesh(axes, layers((TP, SHARD), (SHARD,))))


@pytest.mark.parametrize("shape", [(3, MEBI), (100_003, 8), (2, 2, 5, 4096), (7 * MEBI,)])
@pytest.mark.parametrize("replicas", [2, 8])
def test_one_tensor_that_is_nearly_all_is_divided(shape, replicas):
    tensors = {"embed": ("F32", shape, ()), **layers((), hidden=16)}
    assert_even(on_mesh({"dp_replicate": replicas}, tensors))


def test_it_is_one_piece_a_process_and_rows_where_rows_do():
    holdings = on_mesh({"dp_replicate": 4}, {"embed": ("F32", (1000, 512), ())})
    assert [share["embed"] for share in balance(holdings)] == [
        Box((250 * rank, 0), (250, 512)) for rank in range(4)
    ]


def test_what_has_one_holder_weighs_on_what_many_hold():
    """As embeddings at both ends of a pipeline: the middle one writes more of what all have."""
    own = LocalTensor("F32", (100, 64), Box.whole((100, 64)))
    shared = LocalTensor("F32", (300, 64), Box.whole((300, 64)))
    holdings = [{"a": own, "s": shared}, {"s": shared}, {"b": own, "s": shared}]
    shares = balance(holdings)
    loads = written(holdings, shares)
    assert max(loads) <= 1.03 * min(loads)
    assert_written_once(holdings, shares)


def test_groups_that_form_a_ring_are_balanced_as_one():
    """Each rank shares one tensor with a neighbour on one axis, another on the other."""
    tensors = {"a": ("BF16", (400, 12), (TP,)), "b": ("BF16", (400, 22), (SHARD,))}
    assert_even(on_mesh({"dp_shard": 2, "tp": 2}, tensors))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (LocalTensor("F16", (4, 2), Box((2, 0), (2, 2))), r"F16 \[4, 2\] and F32 \[4, 2\]"),
        (LocalTensor("F32", (4, 2), Box((1, 0), (3, 2))), "do not cover it exactly once"),
        (LocalTensor("F32", (4, 2), Box((3, 0), (1, 2))), "do not cover it exactly once"),
    ],
)
def test_boxes_that_do_not_fit_together_are_refused_with_the_name(second, why):
    first = LocalTensor("F32", (4, 2), Box((0, 0), (2, 2)))
    with pytest.raises(CheckpointError, match=f"model/w: .*{why}"):
        balance([{"model/w": first}, {"model/w": second}])


MESHES = st.fixed_dictionaries(
    {axis: st.integers(1, 3) for axis in ("dp_replicate", "dp_shard", "tp")}
).filter(lambda axes: np.prod(list(axes.values())) <= 8)
CUTS = st.lists(
    st.builds(AxisShard, st.sampled_from(["dp_shard", "tp"]), st.integers(0, 1)),
    max_size=2,
    unique_by=lambda cut: cut.axis,
).map(tuple)
MATRICES = st.tuples(
    st.sampled_from(sorted(ITEM_SIZES)), st.tuples(*[st.integers(0, 40)] * 2), CUTS
)
VECTORS = st.tuples(
    st.sampled_from(sorted(ITEM_SIZES)),
    st.tuples(st.integers(0, 200)),
    CUTS.map(lambda cuts: tuple(AxisShard(cut.axis, 0) for cut in cuts)),
)
SCALARS = st.tuples(st.just("F32"), st.just(()), st.just(()))


def fairest(holdings):
    """The least that the fullest rank can write: whoever alone holds something must write it."""
    sizes = {}
    for name in {name for rank in holdings for name in rank}:
        owners = {}
        for rank, tensors in enumerate(holdings):
            if name in tensors:
                owners.setdefault(tensors[name], []).append(rank)
        for one, ranks in owners.items():
            sizes[tuple(ranks)] = sizes.get(tuple(ranks), 0) + one.num_bytes
    everyone = range(len(holdings))
    groups = [set(some) for n in everyone for some in combinations(everyone, n + 1)]
    inside = (sum(size for r, size in sizes.items() if set(r) <= group) for group in groups)
    return max(size / len(group) for size, group in zip(inside, groups, strict=True))


@settings(deadline=None, max_examples=200)
@given(MESHES, st.lists(MATRICES | VECTORS | SCALARS, min_size=1, max_size=6), st.data())
def test_any_tensors_on_any_mesh_are_written_once_and_as_evenly_as_they_can(axes, tensors, data):
    holdings = on_mesh(axes, {str(i): tensor for i, tensor in enumerate(tensors)})
    shares = balance(holdings)
    assert_written_once(holdings, shares)
    loads = written(holdings, shares)
    assert sum(loads) == unique(holdings)
    row = max(num_bytes(dtype, shape) // max(*shape, 1, 1) for dtype, shape, _ in tensors)
    assert max(loads) <= 1.1 * fairest(holdings) + row + 4 * len(tensors)
    rank = data.draw(st.integers(0, len(holdings) - 1))
    assert balance([dict(held) for held in holdings])[rank] == shares[rank]
