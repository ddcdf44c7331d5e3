"""Tensors to bytes and back, for every type, layout in memory and box."""

import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file

from parallel.test_box import shapes_and_boxes
from surefoot.checkpoint.disk import _bytes as stored
from surefoot.checkpoint.disk import tensorfile
from surefoot.checkpoint.disk.tensorfile import plan_save
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box
from surefoot.storage import files

from ..sample import num_open, same_bits


def write(path, tensors):
    (plan,) = plan_save("x", {n: stored.describe(n, t) for n, t in tensors.items()}, None)
    with files.create(path) as file:
        file.reserve(plan.header.file_size)
        return stored.write_file(file, plan, tensors)


def any_values(dtype, shape=(3, 5)):
    size = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", list(stored.DTYPES.values()), ids=str)
def test_every_type_comes_back_bit_by_bit(tmp_path, dtype):
    tensors = {
        "a": any_values(dtype),
        "scalar": any_values(dtype, ()),
        "none": any_values(dtype, (0, 4)),
    }
    hashes = write(tmp_path / "x", tensors)
    with tensorfile.open_path(tmp_path / "x") as file:
        for name, tensor in tensors.items():
            found = torch.empty_like(tensor)
            assert stored.fill(found, file, name) == hashes[name] == file.hash(name)
            assert same_bits(found, tensor)
            assert hashes[name] == files.digest(stored.raw(tensor))


@pytest.mark.parametrize(
    "dtype", [d for d in stored.DTYPES.values() if d != torch.float8_e8m0fnu], ids=str
)
def test_safetensors_reads_our_files_and_we_read_its(tmp_path, dtype):
    tensors = {"a": any_values(dtype), "b": any_values(torch.float64), "c": any_values(dtype, ())}
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    for name, tensor in load_file(tmp_path / "ours").items():
        assert same_bits(tensor, tensors[name])
    with tensorfile.open_path(tmp_path / "theirs") as file:
        for name, tensor in tensors.items():
            assert same_bits(stored.read_box(file, name, Box.whole(tuple(tensor.shape))), tensor)


@given(shapes_and_boxes())
def test_a_box_is_what_a_slice_is(tmp_path_factory, case):
    shape, box = case
    tensor = torch.arange(Box.whole(shape).size, dtype=torch.int16).reshape(shape)
    path = tmp_path_factory.mktemp("box") / "x"
    write(path, {"before": torch.ones(3), "t": tensor})
    with tensorfile.open_path(path) as file:
        assert torch.equal(stored.read_box(file, "t", box), tensor[box.slices_in(Box.whole(shape))])


class Marked(torch.Tensor):
    """A tensor of another class may mean its values otherwise than by their bytes."""


def views():
    base = torch.randn(6, 4, 8)
    yield base.permute(2, 0, 1)
    yield base[::2, 1:3]
    yield base[1]
    yield torch.randn(5, 1).expand(5, 7)
    yield torch.randn(7).requires_grad_()
    yield torch.nn.Parameter(torch.randn(3).bfloat16())
    yield torch.view_as_complex(torch.randn(4, 2)).conj()
    yield torch.view_as_complex(torch.randn(4, 2)).conj().imag
    yield torch.randn(3, 4).t()[:, 1]


@pytest.mark.parametrize("tensor", list(views()), ids=lambda t: f"{tuple(t.shape)}")
@pytest.mark.parametrize("block", [1, 16, 8 << 20])
def test_a_tensor_is_stored_by_value_however_it_lies_in_memory(
    tmp_path, monkeypatch, tensor, block
):
    monkeypatch.setattr(files, "BLOCK", max(block, tensor.element_size()))
    before = tensor.detach().clone()
    hashes = write(tmp_path / "x", {"t": tensor})
    plain = before.resolve_conj().resolve_neg().contiguous()
    assert same_bits(load_file(tmp_path / "x")["t"], plain)
    assert hashes["t"] == files.digest(stored.raw(plain))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(2, device="meta"), "cannot store a meta tensor"),
        (torch.eye(2).to_sparse(), "cannot store a torch.sparse_coo tensor"),
        (
            torch.ones(2, dtype=torch.complex128),
            "cannot store torch.complex128; safetensors has bool",
        ),
        (torch.ones(2).as_subclass(Marked), "cannot store a Marked; only plain tensors"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_what_has_no_bytes_of_its_own_is_refused(tensor, why):
    with pytest.raises(CheckpointError, match=f"model: w: {why}"):
        stored.describe("model: w", tensor)


def test_a_key_that_is_not_there_is_named(tmp_path):
    write(tmp_path / "x", {"a": torch.ones(2)})
    with tensorfile.open_path(tmp_path / "x") as file:
        with pytest.raises(CheckpointError, match="it contains no tensor 'b'"):
            file.hash("b")
        with pytest.raises(CheckpointError, match="is outside of shape"):
            stored.read_box(file, "a", Box((1,), (2,)))
        with pytest.raises(CheckpointError, match="is outside of shape"):
            stored.read_box(file, "a", Box((0, 0), (1, 1)))
        with pytest.raises(ValueError, match="a: the buffer has 12 bytes, expected 8"):
            stored.fill(torch.ones(3), file, "a")


def test_a_bool_that_is_neither_is_refused(tmp_path):
    write(tmp_path / "x", {"a": torch.tensor([True, False])})
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] = 2
    (tmp_path / "x").write_bytes(data)
    with tensorfile.open_path(tmp_path / "x") as file:
        with pytest.raises(CheckpointError, match="a bool must be 0 or 1"):
            stored.fill(torch.zeros(2, dtype=torch.bool), file, "a")
        with pytest.raises(CheckpointError, match="a bool must be 0 or 1"):
            stored.read_box(file, "a", Box((1,), (1,)))


def test_memory_that_is_not_there_is_an_error_of_the_checkpoint():
    (plan,) = plan_save("x", {"a": ("F64", (1 << 55,))}, None)
    with pytest.raises(CheckpointError, match="not enough memory: 288,230,376,151,711,744 bytes"):
        stored.new_tensor(plan.header.entries["a"])


def test_a_file_that_is_damaged_is_closed_again(tmp_path):
    (tmp_path / "x").write_bytes(b"12345678")
    before = num_open()
    for _ in range(20):
        with pytest.raises(CheckpointError):
            tensorfile.open_path(tmp_path / "x")
    assert num_open() == before
