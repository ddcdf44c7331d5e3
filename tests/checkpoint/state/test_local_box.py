"""What a process holds of a tensor, and what of it is written.

Meshes of any size in one process: torch's fake process group says that it is any rank of them.
"""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.checkpoint.saving._balancing import LocalTensor, balance
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.state.states import local_box_of
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import AxisShard, Box

from ..sample import Holder

AXES = ("dp_replicate", "dp_shard", "tp")


def test_a_plain_tensor_is_whole_in_every_process():
    tensor = torch.randn(3, 2)
    found = local_box_of("x", tensor)
    assert found.values is tensor
    assert (found.shape, found.box) == ((3, 2), Box.whole((3, 2)))


def test_a_part_can_be_narrowed_and_stays_the_same_memory():
    tensor = torch.arange(12.0).reshape(4, 3).requires_grad_()
    found = local_box_of("x", tensor).narrowed(Box((1, 0), (2, 3)))
    assert torch.equal(found.values, tensor.detach()[1:3])
    assert found.values.data_ptr() == tensor[1].data_ptr()
    again = found.narrowed(Box((2, 1), (1, 2)))
    assert again.values.tolist() == [[7.0, 8.0]]
    assert again.shape == (4, 3)


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
    made = [AxisShard(axis, draw(st.integers(0, len(shape) - 1))) for axis in axes]
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
            yield local_box_of("model: a.weight", tensor, cuts), whole


def inside(box):
    return box.slices_in(Box.whole(tuple(a + n for a, n in zip(box.start, box.shape, strict=True))))


@settings(max_examples=60)
@given(spread())
def test_each_rank_holds_its_elements_and_each_element_is_written_once(case):
    shape, sizes, cuts = case
    held = []
    for found, whole in parts(shape, sizes, cuts):
        assert found.shape == shape
        assert torch.equal(found.values, whole[inside(found.box)])
        held.append({"model/a.weight": LocalTensor("F32", shape, found.box)})
    written = np.zeros(shape, int)
    chosen = [one.get("model/a.weight") for one in balance(held)]
    for box, one in zip(chosen, held, strict=True):
        if box is not None:
            assert box & one["model/a.weight"].box == box or not box.size
            written[inside(box)] += 1
    assert (written == 1).all()
    assert any(box is not None for box in chosen)  # of an empty tensor, too, it is said


def test_a_process_that_saves_alone_is_refused_a_part_of_a_tensor(tmp_path):
    with as_rank(0, (1, 2, 1)) as mesh:
        placements = [Replicate(), Shard(0), Replicate()]
        part_of = DTensor.from_local(torch.ones(3, 2), mesh, placements, run_check=False)
        told = r"model: w: this process saves alone, but has only \[3, 2\] of \[6, 2\]"
        with pytest.raises(CheckpointError, match=told):
            save(tmp_path, 1, {"model": Holder({"w": part_of})})
    assert not list(tmp_path.iterdir())
