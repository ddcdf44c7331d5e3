"""Tensors into files: as Hugging Face splits them, none lost, none too large."""

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk.tensorfile import plan_save

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
