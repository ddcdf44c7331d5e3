"""What a process holds of a tensor, and whether it writes it.

Meshes of any size in one process: torch's fake process group says that it is any rank of them.
"""

import contextlib
import itertools
import math

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.checkpoint.box import Box
from surefoot.checkpoint.boxed import part
from surefoot.cuts import Cut

AXES = ("dp_replicate", "dp_shard", "tp")


def test_a_plain_tensor_is_whole_everywhere_and_written_by_the_first():
    tensor = torch.randn(3, 2)
    for is_main in (True, False):
        found = part("x", tensor, is_main=is_main)
        assert (found.values is tensor, found.box, found.is_mine) == (
            True,
            Box.whole((3, 2)),
            is_main,
        )


@contextlib.contextmanager
def as_rank(rank, sizes):
    """The mesh as that rank sees it."""
    count = math.prod(sizes)
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    finally:
        dist.destroy_process_group()


def cut_by_hand(whole, cuts, sizes, place):
    """What is left of ``whole`` after torch.chunk for every cut in turn."""
    for cut in cuts:
        axis = AXES.index(cut.axis)
        pieces = whole.chunk(sizes[axis], cut.dim) if whole.shape[cut.dim] else [whole]
        pieces = [*pieces, *[whole.narrow(cut.dim, 0, 0)] * sizes[axis]]
        whole = pieces[place[axis]]
    return whole.contiguous()


@st.composite
def spread(draw):
    """A tensor's shape, a mesh, and cuts of it: several of one dimension in any order, too."""
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    sizes = tuple(draw(st.tuples(*[st.integers(1, 4)] * 3).filter(lambda s: math.prod(s) <= 12)))
    axes = draw(st.permutations(AXES)) if shape else ()
    made = [Cut(axis, draw(st.integers(0, len(shape) - 1))) for axis in axes]
    return shape, sizes, tuple(made[: draw(st.integers(0, len(made)))])


def parts(shape, sizes, cuts):
    """What every rank holds of a tensor whose elements are numbered."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    for rank, place in enumerate(itertools.product(*map(range, sizes))):
        with as_rank(rank, sizes) as mesh:
            placements = [Replicate()] * 3
            for cut in cuts:  # torch's word for the order does not matter: the cuts are told
                placements[AXES.index(cut.axis)] = Shard(cut.dim)
            local = cut_by_hand(whole, cuts, sizes, place)
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=whole.stride()
            )
            yield part("model: a.weight", tensor, cuts, is_main=rank == 0), whole


@settings(max_examples=60)
@given(spread())
def test_each_rank_holds_its_elements_and_each_element_is_written_once(case):
    shape, sizes, cuts = case
    written = np.zeros(shape, int)
    for found, whole in parts(shape, sizes, cuts):
        ends = [a + n for a, n in zip(found.box.start, found.box.shape, strict=True)]
        inside = tuple(map(slice, found.box.start, ends))
        assert found.shape == shape
        assert torch.equal(found.values, whole[inside])
        if found.is_mine:
            written[inside] += 1
    assert (written == 1).all()
    if not math.prod(shape):  # nothing to write, but that it is there
        assert sum(found.is_mine for found, _ in parts(shape, sizes, cuts)) == 1


@settings(max_examples=5)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2))
def test_copies_are_written_by_all_who_hold_them(replicate, shard, tp):
    """Spread by name: of many tensors, every rank writes some."""
    sizes, cuts = (replicate, shard, tp), (Cut("tp", 0), Cut("dp_shard", 0))
    mine = []
    for rank in range(math.prod(sizes)):
        with as_rank(rank, sizes) as mesh:
            place = tuple(mesh.get_coordinate())
            local = cut_by_hand(torch.zeros(12, 2), cuts, sizes, place)
            placements = [Replicate(), Shard(0), Shard(0)]
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=(12, 2), stride=(2, 1)
            )
            names = [f"layers.{i}.weight" for i in range(400)]
            mine.append(sum(part(name, tensor, cuts).is_mine for name in names))
    mean = 400 / replicate
    assert all(abs(count - mean) < 0.3 * mean for count in mine)
