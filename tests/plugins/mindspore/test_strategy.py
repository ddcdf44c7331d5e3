import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box, is_covered_once
from surefoot.plugins.mindspore.strategy import (
    dump_strategy,
    integer,
    message,
    open_strategy,
    packed,
    wire_fields,
)
from surefoot.plugins.mindspore.tensor_layout import ALL_COPIES, TensorLayout

LAYOUTS = {
    "wq": TensorLayout((2, 2), ((0, -1),), ALL_COPIES, 2),
    "norm": TensorLayout((2, 2), ((-1,),)),
    "deep": TensorLayout((2, 2), ((1, 0), (-1,))),
}


def write(folder, name, data):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("name", "devices", "stages"), [("dp2mp2", 4, 1), ("pp2mp2", 2, 2), ("w8_pp2dp2mp2_opt", 4, 2)]
)
def test_the_files_of_the_ranks_and_the_merged_file_say_the_same(real, name, devices, stages):
    found = open_strategy(real / name / "strategy")
    merged = open_strategy(real / name / "merged_strategy.ckpt")
    assert (found.num_devices, len(found.stages)) == (devices, stages)
    assert list(found.stages) == list(merged.stages)


@pytest.mark.parametrize("name", ["dp2mp2_opt", "pp2mp2"])
def test_what_is_read_agrees_with_the_layout_that_mindspore_reports(real, name):
    found = open_strategy(real / name / "strategy")
    for rank in range(4):
        told = json.loads((real / name / "layout" / f"rank_{rank}.json").read_text())["params"]
        layouts, _ = found.of_rank(rank)
        for tensor, layout in layouts.items():
            if tensor in told:
                matrix, tensor_map = told[tensor][:2]
                assert (list(layout.device_matrix), list(layout.tensor_map[0])) == (
                    matrix,
                    tensor_map,
                )


def test_a_file_that_was_written_is_read_back(tmp_path):
    folder = write(tmp_path / "strategy", "s_rank_0.ckpt", dump_strategy(0, LAYOUTS))
    assert open_strategy(folder).stages == [LAYOUTS]


def test_json_says_the_same(tmp_path):
    item = {"dev_matrix": [2, 2], "tensor_map": [0, -1], "tensor_shape": [4, 4], "field": 0}
    item |= {"opt_weight_shard_step": 2, "opt_weight_shard_size": -1}
    told = {"current_stage": 0, "parallel_strategy_item": {"MatMul": {"stage": 0}}}
    told["parallel_layout_item"] = {"wq": item}
    folder = write(tmp_path / "s", "s_rank_0.json", json.dumps(told).encode())
    assert open_strategy(folder).stages == [{"wq": LAYOUTS["wq"]}]


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a_rank_0.ckpt", b"\x0a\xff", "not a strategy file"),
        ("a_rank_0.ckpt", b"PK\x03\x04", "not a strategy file"),
        ("a_rank_0.ckpt", b"", "describes no tensors"),
        ("a_rank_0.json", b"[]", "expected a JSON object"),
        ("a_rank_0.json", b"{}", "expected parallel_layout_item"),
        ("a_rank_0.json", b'{"parallel_layout_item": {"a": {}}}', "expected whole numbers"),
        (
            "a_rank_2.ckpt",
            dump_strategy(0, {"a": TensorLayout((2,), ((0,),))}),
            "stage 0 is missing",
        ),
        ("a_rank_0.ckpt", dump_strategy(0, {"a": TensorLayout((0,), ((0,),))}), "no matrix of dev"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, name, data, problem):
    folder = write(tmp_path / "s", name, data)
    with pytest.raises(CheckpointError, match=problem):
        open_strategy(folder)


def test_files_that_contradict_each_other_are_refused(tmp_path):
    folder = tmp_path / "s"
    write(folder, "s_rank_0.ckpt", dump_strategy(0, LAYOUTS))
    write(folder, "s_rank_1.ckpt", dump_strategy(0, {"wq": LAYOUTS["norm"]}))
    with pytest.raises(CheckpointError, match=r"s_rank_1.ckpt: differs from the files of the"):
        open_strategy(folder)


def test_cuts_made_by_hand_are_refused(tmp_path):
    layout = message(1, packed(1, [2])) + message(2, packed(1, [0])) + message(3, packed(1, [3, 1]))
    data = message(3, message(1, b"embedding") + message(2, layout))
    with pytest.raises(CheckpointError, match="uneven manual slices"):
        open_strategy(write(tmp_path / "s", "s_rank_0.ckpt", data))


def test_a_folder_without_such_files_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="contains no strategy files"):
        open_strategy(tmp_path)


@given(st.binary(max_size=60))
def test_no_bytes_make_the_reader_fail_otherwise(data):
    with contextlib.suppress(CheckpointError):
        list(wire_fields(data, "file"))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 1000))
def test_integers_survive(value, number):
    (found,) = wire_fields(integer(number, value), "file")
    assert found == (number, value % 2**64)


def boxes(layout, shape):
    return [layout.box(shape, device) for device in range(layout.num_devices)]


def test_axes_are_counted_from_the_right():
    layout = TensorLayout((2, 3), ((0, -1),))
    assert [box.start for box in boxes(layout, (6, 4))] == [(0, 0), (2, 0), (4, 0)] * 2


def test_of_two_axes_on_one_dimension_the_first_counts_most():
    layout = TensorLayout((2, 3), ((1, 0), (-1,)))
    assert [box.start[0] for box in boxes(layout, (6, 4))] == [0, 1, 2, 3, 4, 5]
    turned = TensorLayout((2, 3), ((0, 1), (-1,)))
    assert [box.start[0] for box in boxes(turned, (6, 4))] == [0, 2, 4, 1, 3, 5]


def test_the_optimizer_cuts_what_the_matrix_leaves():
    layout = TensorLayout((2, 2), ((0, -1),), ALL_COPIES)
    assert [box.start[0] for box in boxes(layout, (8, 4))] == [0, 4, 2, 6]


def test_two_of_four_copies_are_the_inner_ones():
    layout = TensorLayout((4,), ((-1,),), 2)
    assert [box.start[0] for box in boxes(layout, (8,))] == [0, 4, 0, 4]


def test_the_optimizer_takes_copies_that_are_not_neighbours():
    layout = TensorLayout((2, 2, 2), ((1, -1),), ALL_COPIES)
    assert [box.start[0] for box in boxes(layout, (8, 4))] == [0, 1, 4, 5, 2, 3, 6, 7]


@given(
    matrix=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    dims=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    shards=st.sampled_from([0, ALL_COPIES]),
    data=st.data(),
)
def test_the_devices_hold_all_of_a_tensor_and_their_part_tells_the_whole(
    matrix, dims, shards, data
):
    free = data.draw(st.permutations(range(len(matrix))))
    maps = [free.pop() if free and data.draw(st.booleans()) else -1 for _ in dims]
    layout = TensorLayout(tuple(matrix), (tuple(maps),), shards)
    shape = tuple(n * count for n, count in zip(dims, layout.counts(len(dims)), strict=True))
    found = boxes(layout, shape)
    assert is_covered_once(Box.whole(shape), sorted(set(found)))
    assert {layout.whole(box.shape) for box in found} == {shape}


@pytest.mark.parametrize(
    ("layout", "shape", "problem"),
    [
        (TensorLayout((2,), ((0,),)), (3,), "a dimension of 3 is not 2 equal parts"),
        (TensorLayout((2,), ((0,), (-1,))), (4,), "sharded in 2 dimensions and has 1"),
        (TensorLayout((2,), ((5,),)), (4,), "does not fit the devices 2"),
        (TensorLayout((2, 2), ((0, 0),)), (4, 4), "does not fit the devices 2 x 2"),
        (TensorLayout((2, 2), ((0,),), 4), (8,), "4 shards of the optimizer do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(layout, shape, problem):
    with pytest.raises(CheckpointError, match=problem):
        layout.box(shape, 0)
