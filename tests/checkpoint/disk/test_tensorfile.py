"""Safetensors headers: ours are read by safetensors, its are read by us, and nonsense by nobody."""

import json

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from surefoot.checkpoint.disk._bytes import DTYPES
from surefoot.checkpoint.disk.tensorfile import (
    ALIGNMENT,
    ITEM_SIZES,
    build,
    header_length,
    parse,
    plan_save,
)
from surefoot.errors import CheckpointError

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda n: n != "__metadata__"
)
SPECS = st.tuples(
    st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)
)


def read(head, size):
    return parse(head[8:], size, "x")


@given(st.dictionaries(NAMES, SPECS, max_size=6))
def test_what_is_laid_out_is_read_back(tensors):
    head, header = build(tensors)
    again = read(head, header.file_size)
    assert dict(again.entries) == dict(header.entries)
    assert {n: (e.dtype, e.shape) for n, e in again.entries.items()} == tensors
    assert again.metadata == {"format": "pt"}
    assert len(head) == header.data_start
    assert len(head) % ALIGNMENT == 0
    assert all(e.offset % ITEM_SIZES[e.dtype] == 0 for e in header.entries.values())


@given(st.dictionaries(NAMES, SPECS, min_size=1, max_size=6))
def test_safetensors_reads_what_is_laid_out(tmp_path_factory, tensors):
    head, header = build(tensors)
    path = tmp_path_factory.mktemp("head") / "x.safetensors"
    path.write_bytes(head + bytes(header.file_size - len(head)))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert {n: tuple(file.get_slice(n).get_shape()) for n in tensors} == {
            n: s for n, (_, s) in tensors.items()
        }
        assert {n: file.get_slice(n).get_dtype() for n in tensors} == {
            n: d for n, (d, _) in tensors.items()
        }


@given(st.dictionaries(NAMES, SPECS, max_size=6))
def test_what_safetensors_writes_is_read(tensors):
    made = {n: torch.zeros(s, dtype=DTYPES[d]) for n, (d, s) in tensors.items() if d != "F8_E8M0"}
    data = save(made, metadata={"who": "me"})
    length = header_length(data[:8], len(data), "x")
    header = parse(data[8 : 8 + length], len(data), "x")
    assert {n: (DTYPES[e.dtype], e.shape) for n, e in header.entries.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in made.items()
    }


@given(st.binary(max_size=300))
def test_noise_is_refused(data):
    with pytest.raises(CheckpointError):
        parse(data[8 : 8 + header_length(data[:8], len(data), "x")], len(data), "x")


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("tensors", "size", "why"),
    [
        ({"a": entry()}, 8, "followed by something else"),
        ({"a": entry()}, 2, "truncated"),
        ({"a": entry(), "b": entry()}, 8, "overlaps"),
        ({"a": entry(), "b": entry(offsets=(8, 12))}, 12, "leaves a hole"),
        ({"a": entry(offsets=(4, 8))}, 8, "leaves a hole"),
        ({"a": entry(offsets=(4, 0))}, 4, "-4 bytes, but F32"),
        ({"a": entry(offsets=(0, 5))}, 5, "5 bytes, but F32"),
        ({"a": entry(dtype="F99")}, 4, "unknown dtype 'F99'"),
        ({"a": entry(dtype=["F32"])}, 4, "unknown dtype"),
        ({"a": entry(shape=(-1,))}, 4, "expected sizes"),
        ({"a": entry(shape=(True,))}, 4, "expected sizes"),
        ({"a": entry(shape=(1.0,))}, 4, "expected sizes"),
        ({"a": entry(shape=(1,) * 65)}, 4, "expected sizes"),
        ({"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}, 0, "larger than any memory"),
        ({"a": entry(shape=(2**63,))}, 4, "expected sizes"),
        ({"a": entry(offsets=(0, 4, 4))}, 4, "expected sizes"),
        ({"a": {**entry(), "extra": 1}}, 4, "expected dtype, shape and data_offsets"),
        ({"a": [1, 2]}, 4, "expected dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, 0, "must map names to text"),
        ({"__metadata__": "text"}, 0, "must map names to text"),
    ],
)
def test_a_header_that_lies_is_refused(tensors, size, why):
    text = json.dumps(tensors).encode()
    with pytest.raises(CheckpointError, match=why):
        parse(text, 8 + len(text) + size, "x")


@pytest.mark.parametrize(
    "text", [b'[{"a": 1}]', b' {"a": 1}', b"", b'{"a":{"dtype":"F32"}}', b'{"a":1,"a":1}']
)
def test_a_header_that_is_no_header_is_refused(text):
    with pytest.raises(CheckpointError):
        parse(text, 8 + len(text), "x")


@pytest.mark.parametrize("length", [0xFFFFFFFFFFFFFFFF, 100_000_001, 93, 1 << 40])
def test_a_length_longer_than_the_file_is_refused_before_memory_is_taken(length):
    with pytest.raises(CheckpointError, match="truncated, damaged, or not a safetensors file"):
        header_length(length.to_bytes(8, "little"), 100, "x")


def test_the_longest_possible_header_is_taken():
    assert header_length((92).to_bytes(8, "little"), 100, "x") == 92
    with pytest.raises(CheckpointError, match="too few"):
        header_length(b"1234567", 7, "x")


def test_names_that_safetensors_cannot_hold_are_refused():
    with pytest.raises(CheckpointError, match="reserves it"):
        build({"__metadata__": ("F32", (1,))})
    with pytest.raises(CheckpointError, match="not valid Unicode"):
        build({"a\ud800": ("F32", (1,))})


def test_a_header_too_long_for_safetensors_is_refused(monkeypatch):
    monkeypatch.setattr("surefoot.checkpoint.disk.tensorfile.MAX_HEADER", 200)
    with pytest.raises(CheckpointError, match="choose a smaller max_shard_size"):
        build({f"tensor {i}": ("F32", (1,)) for i in range(5)})


def test_every_type_we_name_is_one_torch_has():
    assert DTYPES.keys() == ITEM_SIZES.keys()
    assert all(DTYPES[name].itemsize == size for name, size in ITEM_SIZES.items())


SIZES = st.lists(st.integers(0, 30), max_size=15)


def tensors(sizes):
    return {f"t{i:02d}": ("F32", (size,)) for i, size in enumerate(sizes)}


@given(SIZES, st.integers(1, 100))
def test_every_tensor_is_in_one_file_and_no_file_is_too_large(sizes, limit):
    plans = plan_save("model", tensors(sizes), limit)
    placed = [name for plan in plans for name in plan.header.entries]
    assert sorted(placed) == sorted(tensors(sizes))
    for plan in plans:
        held = plan.header.file_size - plan.header.data_start
        assert held <= limit or len(plan.header.entries) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=15), st.integers(1, 100))
def test_the_split_is_hugging_faces_while_no_tensor_is_over_the_limit(sizes, limit):
    limit = max(limit, 4 * max(sizes))
    made = {name: torch.zeros(shape) for name, (_, shape) in tensors(sizes).items()}
    theirs = split_torch_state_dict_into_shards(made, max_shard_size=limit)
    ours = plan_save("model", tensors(sizes), limit)
    assert {p.name: sorted(p.header.entries) for p in ours} == {
        n: sorted(v) for n, v in theirs.filename_to_tensors.items()
    }


def test_without_a_limit_there_is_one_file():
    (plan,) = plan_save("adapter_model", tensors([10**9, 10**9]), None)
    assert plan.name == "adapter_model.safetensors"


def test_a_tensor_over_the_limit_has_its_own_file_and_order_is_kept():
    plans = plan_save("model", tensors([1, 100, 1, 1]), 16)
    assert [list(p.header.entries) for p in plans] == [["t00"], ["t01"], ["t02", "t03"]]
    assert plans[0].name == "model-00001-of-00003.safetensors"
