"""Views over weights: lazy, box by box, and equal to doing it to whole tensors in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from damage import flip
from parallel.test_box import boxes
from surefoot.checkpoint import sources as sources
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import (
    CastSource,
    JoinedSource,
    Renamed,
    TensorsInMemory,
    read_whole,
)
from surefoot.errors import CheckpointError, DamagedFileError
from surefoot.parallel.sharding import Box
from surefoot.plugins.mindspore.naming import InterleavedSource, turns_of

from ..sample import Holder, num_open, same_bits


def parts():
    torch.manual_seed(0)
    return {
        "q": torch.randn(6, 4),
        "k": torch.randn(2, 4),
        "v": torch.randn(2, 4).bfloat16(),
        "ids": torch.arange(3),
    }


def laid_end_to_end(source, name, parts):
    turns = turns_of(parts, [source.shapes()[part][0] for part in parts])
    return InterleavedSource(source, {name: turns})


def agree(view, expected):
    """A view says what tensors it has, and gives their values whole and in any box."""
    assert view.shapes() == {name: tuple(t.shape) for name, t in expected.items()}
    assert view.dtypes() == {name: t.dtype for name, t in expected.items()}
    for name, tensor in expected.items():
        assert same_bits(read_whole(view, name), tensor)


@given(st.data())
def test_any_box_of_any_view_is_that_box_of_the_whole(data):
    q, k, v, ids = parts().values()
    view = CastSource(
        Renamed(
            laid_end_to_end(TensorsInMemory(parts()), "qkv", ("q", "k", "v")),
            {"new": "qkv", "i": "ids"},
        ),
        torch.float16,
    )
    whole = {"new": torch.cat([q, k, v.float()]).half(), "i": ids}
    name = data.draw(st.sampled_from(["new", "i"]))
    box = data.draw(boxes(tuple(whole[name].shape)))
    found = view.read(name, box)
    assert tuple(found.shape) == box.shape
    assert torch.equal(found, whole[name][box.slices_in(Box.whole(tuple(whole[name].shape)))])


def test_renaming_leaves_out_what_is_not_named():
    agree(
        Renamed(TensorsInMemory(parts()), {"a": "q", "b": "q"}),
        {"a": parts()["q"], "b": parts()["q"]},
    )


def test_fusing_replaces_the_parts():
    p = parts()
    agree(
        laid_end_to_end(TensorsInMemory(p), "qk", ("q", "k")),
        {"v": p["v"], "ids": p["ids"], "qk": torch.cat([p["q"], p["k"]])},
    )


def test_casting_leaves_integers_bools_and_tiny_floats():
    tensors = {"i": torch.arange(3), "b": torch.ones(2, dtype=torch.bool), "f": torch.randn(3)}
    tensors["e"] = torch.randn(3).to(torch.float8_e4m3fn)
    agree(
        CastSource(TensorsInMemory(tensors), torch.bfloat16),
        {**tensors, "f": tensors["f"].bfloat16()},
    )


class Counting:
    """A source that notes the elements it is asked for."""

    def __init__(self, source):
        self.source, self.elements = source, 0

    def shapes(self):
        return self.source.shapes()

    def dtypes(self):
        return self.source.dtypes()

    def read(self, name, box):
        self.elements += box.size
        return self.source.read(name, box)


def test_only_what_a_box_needs_is_read():
    base = Counting(TensorsInMemory(parts()))
    laid_end_to_end(base, "qkv", ("q", "k", "v")).read("qkv", Box((5, 1), (2, 3)))
    assert base.elements == 6


@pytest.fixture
def native(tmp_path):
    return save(tmp_path, 1, {"model": Holder({"w": torch.arange(40.0).reshape(8, 5)})})


def test_a_damaged_tensor_is_refused_when_it_is_read_whole(native):
    flip(native / "model.safetensors")
    with pytest.raises(CheckpointError, match="w is damaged: its hash does not match"):
        read_whole(open_folder(native), "w")


@pytest.mark.parametrize("limit", [5, 7, 12, 39])
def test_a_damaged_tensor_is_refused_when_its_last_block_is_read_in_order(native, limit):
    source = open_folder(native)
    for box in Box.whole((8, 5)).blocks(limit):
        source.read("w", box)
    flip(native / "model.safetensors")
    source = open_folder(native)
    *first, last = Box.whole((8, 5)).blocks(limit)
    for box in first:
        source.read("w", box)
    with pytest.raises(CheckpointError, match="damaged"):
        source.read("w", last)


ODD = {
    "in the middle": Box((3, 0), (2, 5)),
    "the end": Box((5, 0), (3, 5)),
    "a column": Box((0, 2), (8, 1)),
}


@pytest.mark.parametrize("box", ODD.values(), ids=ODD)
def test_a_box_that_is_not_the_next_is_checked_with_all_of_its_tensor(native, box):
    whole = torch.arange(40.0).reshape(8, 5)
    source = open_folder(native)
    for one in (box, Box((0, 0), (0, 5)), *Box.whole((8, 5)).blocks(10)):
        assert torch.equal(source.read("w", one), whole[one.slices_in(Box.whole((8, 5)))])
    flip(native / "model.safetensors")  # in the last element
    with pytest.raises(DamagedFileError, match="w is damaged") as raised:
        open_folder(native).read("w", box)
    assert raised.value.folder == native


def test_an_empty_tensor_is_whole(tmp_path):
    folder = save(tmp_path, 1, {"model": Holder({"none": torch.empty(0, 3)})})
    assert tuple(read_whole(open_folder(folder), "none").shape) == (0, 3)


def test_a_file_that_shrinks_under_a_source_is_an_error(tmp_path):
    save_file({"w": torch.ones(100)}, tmp_path / "model.safetensors")
    source = open_folder(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match="too early"):
        read_whole(source, "w")


def test_a_source_needs_no_closing(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    before = num_open()
    for _ in range(50):
        open_folder(tmp_path)
    assert num_open() <= before
    assert sources.TensorSource  # a Protocol: nothing to inherit


def test_sources_stand_beside_each_other_with_what_tells_their_names_apart():
    one, other = torch.ones(2), torch.zeros(3, dtype=torch.int64)
    source = JoinedSource(
        [("", TensorsInMemory({"a": one})), ("moment.", TensorsInMemory({"a": other}))]
    )
    assert source.shapes() == {"a": (2,), "moment.a": (3,)}
    assert source.dtypes() == {"a": torch.float32, "moment.a": torch.int64}
    assert torch.equal(read_whole(source, "a"), one)
    assert torch.equal(read_whole(source, "moment.a"), other)
