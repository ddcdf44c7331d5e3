"""Checkpoints of DeepSpeed: the tensors that went in come out, and nothing of theirs runs."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from zero_folders import model_state, write_zero

from checkpoint.sample import num_open, same
from surefoot.checkpoint.layouts.opening import open_any, open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box

ALIAS = [("lm_head.weight", "embed.weight")]
GROUPS = [["embed.weight", "layers.0.weight"], ["layers.0.bias", "norm.weight"]]


def made(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (7, 5),
        "layers.0.weight": (3, 11),
        "layers.0.bias": (3,),
        "norm.weight": (),
        "still.weight": (5, 3),
    }
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    tensors["still.weight"] = tensors["still.weight"].bfloat16()
    return {**tensors, "inverse": torch.arange(5)}


def read(folder):
    source = open_any(folder, trust_pickle=True)
    return {name: read_whole(source, name) for name in source.shapes()}


def as_names(tensors):
    return dict(sorted(tensors.items()))


OPTIONS = {"frozen": ["still.weight"], "shared": ALIAS}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_ranks_hold_is_put_together(stage, ranks, tmp_path):
    tensors = made()
    place = write_zero(tmp_path, tensors, GROUPS, stage=stage, ranks=ranks, **OPTIONS)
    assert same(as_names(read(tmp_path)), as_names(tensors))
    assert same(as_names(read(place)), as_names(tensors))


@settings(max_examples=30)
@given(data=st.data())
def test_any_box_is_read_from_the_ranks_that_hold_it(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    tensors = made()
    stage, ranks = data.draw(st.sampled_from([2, 3])), data.draw(st.integers(1, 5))
    write_zero(folder, tensors, GROUPS, stage=stage, ranks=ranks, **OPTIONS)
    source = open_any(folder, trust_pickle=True)
    for name, tensor in tensors.items():
        start = [data.draw(st.integers(0, n)) for n in tensor.shape]
        shape = [data.draw(st.integers(0, n - s)) for n, s in zip(tensor.shape, start, strict=True)]
        box = Box(tuple(start), tuple(shape))
        expected = tensor[box.slices_in(Box.whole(tuple(tensor.shape)))]
        assert torch.equal(source.read(name, box), expected)


def test_without_zero_the_weights_are_whole_in_one_file(tmp_path):
    tensors = made()
    state = {**model_state(tensors, []), "param_shapes": None}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    assert same(as_names(read(tmp_path)), as_names(tensors))


def test_pickles_are_read_on_the_users_word_only(tmp_path):
    write_zero(tmp_path, made(), GROUPS, stage=2, ranks=2)
    with pytest.raises(CheckpointError, match="--trust-pickle") as error:
        open_any(tmp_path)
    assert "\n" not in str(error.value)


class Evil:
    def __reduce__(self):
        return os.system, ("touch surefoot-was-here",)


def test_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = made()
    state = {**model_state(tensors, []), "param_shapes": None, "lr_scheduler": Evil()}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    assert same(as_names(read(tmp_path)), as_names(tensors))
    state["module"]["embed.weight"] = Evil()
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"embed.weight: not a plain tensor"):
        read(tmp_path)
    assert not Path("surefoot-was-here").exists()


@pytest.fixture
def zero(tmp_path):
    return write_zero(tmp_path / "zero", made(), GROUPS, stage=3, ranks=3, **OPTIONS)


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize(
    ("rank", "problem"), [(1, r"the files of rank 1 .* are missing"), (2, r"2 files of ")]
)
def test_a_missing_rank_is_told_the_last_one_too(rank, problem, kind, zero):
    (zero / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").unlink()
    with pytest.raises(CheckpointError, match=problem):
        read(zero)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_of_another_save_is_told(stage, tmp_path):
    place = write_zero(tmp_path / "a", made(), GROUPS, stage=stage, ranks=2)
    longer = {**made(), "embed.weight": torch.randn(9, 9)}
    other = write_zero(tmp_path / "b", longer, GROUPS, stage=stage, ranks=2)
    shutil.copy(other / "zero_pp_rank_1_mp_rank_00_optim_states.pt", place)
    with pytest.raises(CheckpointError, match="values"):
        read(place)


def renamed(folder, old, new):
    (folder / old).rename(folder / new)


def test_what_is_not_read_is_named(tmp_path, zero):
    renamed(
        zero,
        "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(CheckpointError, match="of the same rank; two saves"):
        read(zero)
    for name in ("layer_00-model_states.pt", "layer_1_expert_0_mp_rank_00_model_states.pt"):
        (zero / name).touch()
        with pytest.raises(CheckpointError, match="pipeline layers or experts"):
            read(zero)
        (zero / name).unlink()
    place = write_zero(tmp_path / "tp", made(), GROUPS, stage=2, ranks=1)
    shutil.copy(place / "mp_rank_00_model_states.pt", place / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"tensor or pipeline parallelism .*, whose cut"):
        read(place)
    (tmp_path / "lone").mkdir()
    (tmp_path / "lone" / "latest").write_text("../zero")
    with pytest.raises(CheckpointError, match="is no folder beside it"):
        read(tmp_path / "lone")
    (tmp_path / "lone" / "latest").unlink()
    (tmp_path / "lone" / "zero_to_fp32.py").touch()
    with pytest.raises(CheckpointError, match="no mp_rank_00_model_states"):
        read(tmp_path / "lone")


def test_every_flipped_byte_gives_values_or_an_error(zero):
    """The values themselves have no hashes; of anything else nothing but an error may come."""
    path = zero / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    data, before = path.read_bytes(), num_open()
    for at in range(0, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        try:
            source = open_any(zero, trust_pickle=True)
            [read_whole(source, name) for name, shape in source.shapes().items() if len(shape) < 9]
        except CheckpointError as error:
            assert "\n" not in str(error)
    for keep in range(0, len(data), 997):
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError):
            open_any(zero, trust_pickle=True)
    assert num_open() <= before + 1


def test_a_plain_pickle_is_no_archive(zero):
    path = zero / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path.write_bytes(pickle.dumps({"module": {}}))
    with pytest.raises(CheckpointError, match=r"written by torch before 1\.6 as a plain pickle"):
        read(zero)


def test_a_transposed_tensor_is_read_in_its_order(tmp_path):
    tensor = torch.randn(3, 4).t()
    state = {**model_state({"w": tensor}, []), "param_shapes": None}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    assert torch.equal(read(tmp_path)["w"], tensor)


def test_a_program_is_not_loaded(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="it is damaged, or"):
        read(tmp_path)


def test_safetensors_beside_it_come_first(tmp_path):
    write_zero(tmp_path, made(), GROUPS, stage=2, ranks=2)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    source = open_any(tmp_path)
    assert torch.equal(read_whole(source, "w"), load_file(tmp_path / "model.safetensors")["w"])


def test_other_commands_say_what_it_is(zero):
    with pytest.raises(CheckpointError, match=r"of DeepSpeed, .* --to huggingface --trust-pickle"):
        open_folder(zero.parent)
