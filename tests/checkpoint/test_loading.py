"""Loading gives every state what it was, in place where it can, and touches nothing else."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from damage import flip
from surefoot.checkpoint.disk.manifest import dump, parse
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import CheckpointError, DamagedFileError

from .disk.test_manifest import sealed
from .sample import Holder, blank, same, same_states, sample_states


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path, 7, sample_states(), companions={"config.json": b"{}"})


@pytest.mark.parametrize("limit", [5_000_000_000, 700])
def test_every_state_comes_back_bit_by_bit(tmp_path, limit):
    folder = save(tmp_path, 7, sample_states(scale=3), max_shard_size=limit)
    states = blank(sample_states(scale=3))
    load(folder, states)
    assert same_states(sample_states(scale=3), states)
    assert all(state.loads == 1 for state in states.values())


def test_tensors_that_fit_are_read_in_place(folder):
    states = sample_states(seed=1)
    kept = {name: t.data_ptr() for name, t in states["model"].state.items()}
    moment = states["optimizer"].state["model.norm.weight"]["exp_avg"]
    random = states["random"].state["torch"]
    load(folder, states)
    assert same_states(sample_states(), states)
    assert kept == {name: t.data_ptr() for name, t in states["model"].state.items()}
    assert states["optimizer"].state["model.norm.weight"]["exp_avg"] is moment
    assert states["random"].state["torch"] is random


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.double(),
        lambda t: t.repeat(2)[::2],
        lambda t: torch.nn.Parameter(t.clone()),
        lambda t: t.expand(2, 8)[0],
    ],
    ids=["another type", "strided", "parameter", "row of an expanded tensor"],
)
def test_tensors_that_do_not_fit_are_read_beside(folder, other):
    states = sample_states(seed=1)
    states["model"].state["model.norm.weight"] = other(torch.zeros(8))
    load(folder, states)
    assert same(
        states["model"].state["model.norm.weight"].detach(),
        sample_states()["model"].state["model.norm.weight"],
    )


def test_only_the_named_states_are_loaded(folder):
    states = blank(sample_states())
    load(folder, states, only=["model", "trainer"])
    assert {name: state.loads for name, state in states.items()} == {
        "model": 1, "optimizer": 0, "random": 0, "loader": 0, "trainer": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no state 'modle'; there are model, optimizer"):
        load(folder, states, only=["modle"])


def test_a_model_can_be_loaded_while_another_part_is_damaged(folder):
    (folder / "optimizer.safetensors").unlink()
    load(folder, blank(sample_states()), only=["model"])


def unchanged_after(folder, states, match):
    before = sample_states(seed=1)
    with pytest.raises(CheckpointError, match=match):
        load(folder, states)
    for name, state in states.items():
        assert state.loads == 0
        if name != "model":
            assert same(state.state, before[name].state)
    kept = {
        n: t
        for n, t in states["model"].state.items()
        if n in before["model"].state and t.shape == before["model"].state[n].shape
    }
    assert all(same(t, before["model"].state[n]) for n, t in kept.items())


FIVE = r"extra.0, extra.1, extra.2, … \(5 in total\)"


@pytest.mark.parametrize(
    ("num_extra", "gone", "match"),
    [
        (
            5,
            1,
            rf"4 tensors where this run has 8: missing in it: {FIVE}; unknown to this run: mode",
        ),
        (1, 0, r"missing in it: extra.0; unknown to this run: none$"),
        (0, 1, r"4 tensors where this run has 3: missing in it: none;"),
    ],
)
def test_missing_and_unexpected_tensors_are_another_model(num_extra, gone, match, folder):
    states = sample_states(seed=1)
    weights = states["model"].state
    weights |= {f"extra.{i}": torch.zeros(1) for i in range(num_extra)}
    for _ in range(gone):
        del weights["model.norm.weight"]
    unchanged_after(folder, states, f"another model, with .*{match}")


def test_another_shape_is_another_model(folder):
    states = sample_states(seed=1)
    states["model"].state["model.norm.weight"] = torch.zeros(9)
    unchanged_after(
        folder,
        states,
        r"another model: model tensor model.norm.weight has shape \[8\] in it, \[9\] here$",
    )
    states["model"].state["model.embed_tokens.weight"] = torch.zeros(9)
    unchanged_after(folder, states, "2 tensors differ")


def test_another_shape_in_the_optimizer_is_another_model(folder):
    states = sample_states(seed=1)
    states["optimizer"].state["model.norm.weight"]["exp_avg"] = torch.zeros(9)
    with pytest.raises(
        CheckpointError, match=r"optimizer tensor model.norm.weight.exp_avg has shape \[8\] in it"
    ):
        load(folder, states)


def test_a_state_of_another_shape_is_replaced(folder):
    states = sample_states(seed=1)
    states["random"].state = {"torch": torch.zeros(3), "other": 1}
    load(folder, states)
    assert same(states["random"].state, sample_states()["random"].state)


def test_a_state_that_was_not_saved_is_named(folder):
    states = {**sample_states(seed=1), "scaler": Holder({})}
    with pytest.raises(
        CheckpointError, match="it contains no state 'scaler', only loader, optimizer, random"
    ):
        load(folder, states)
    assert all(state.loads == 0 for state in states.values())


def test_a_flipped_bit_in_a_tensor_stops_the_load(folder):
    flip(folder / "model.safetensors")
    states = blank(sample_states())
    with pytest.raises(CheckpointError, match=r".* has changed since it was saved"):
        load(folder, states)
    assert all(state.loads == 0 for state in states.values())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json"]
)
def test_a_file_that_is_missing_short_or_long_changes_nothing(folder, name):
    data = (folder / name).read_bytes()
    for broken in (data[:-1], data + b"\0", b""):
        (folder / name).write_bytes(broken)
        unchanged_after(folder, sample_states(seed=1), name)
    (folder / name).unlink()
    unchanged_after(folder, sample_states(seed=1), rf"{name}: it does not exist")


def test_a_file_replaced_by_a_link_is_not_followed(folder, tmp_path):
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    unchanged_after(folder, sample_states(seed=1), "symbolic link")


def test_a_folder_that_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint-9: this checkpoint does not exist"):
        load(tmp_path / "checkpoint-9", {})
    (tmp_path / "checkpoint-9").mkdir()
    with pytest.raises(CheckpointError, match="was never committed"):
        load(tmp_path / "checkpoint-9", {})


def rewrite(folder, change):
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_bytes(sealed(raw))


def test_a_manifest_that_promises_more_than_the_file_holds_takes_no_memory(folder):
    def grow(raw):
        for piece in raw["pieces"]:
            if piece["tensor"] == "state/random.torch":
                piece["shape"], piece["box"] = [1 << 50], [[0], [1 << 50]]

    rewrite(folder, grow)
    unchanged_after(
        folder, sample_states(seed=1), r"expected U8 \[1125899906842624\] as in the manifest"
    )


def test_a_manifest_that_names_other_tensors_than_the_file_is_refused(folder):
    def rename(raw):
        next(p for p in raw["pieces"] if p["tensor"] == "state/random.torch")["key"] = "other"

    rewrite(folder, rename)
    unchanged_after(
        folder, sample_states(seed=1), "file and manifest disagree about tensor 'other'"
    )


def test_a_skeleton_that_points_nowhere_is_refused(folder):
    def forget(raw):
        raw["pieces"] = [p for p in raw["pieces"] if not p["tensor"].startswith("state/")]

    rewrite(folder, forget)
    unchanged_after(folder, sample_states(seed=1), "random: tensor 'random.torch' is missing")


def test_a_checkpoint_without_its_state_is_refused(folder):
    def forget(raw):
        del raw["files"]["state.json"], raw["hashes"]["state.json"]

    rewrite(folder, forget)
    unchanged_after(
        folder,
        sample_states(seed=1),
        r"a weights-only checkpoint; it has no training state \(state\.json\)",
    )


def test_a_checkpoint_from_a_later_minor_version_is_read(folder):
    rewrite(folder, lambda raw: raw.update(version="1.9", something_new={"a": 1}))
    states = blank(sample_states())
    load(folder, states)
    assert same_states(sample_states(), states)


def test_what_is_dumped_again_is_the_same_checkpoint(folder):
    path = folder / "manifest.json"
    assert dump(parse(path.read_bytes(), "x")) == path.read_bytes()


@pytest.fixture
def half():
    """What one of two ranks has of a tensor of 8 rows: the upper four."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    yield DTensor.from_local(torch.zeros(4, 8), mesh, [TorchShard(0)], run_check=False)
    dist.destroy_process_group()


def test_a_piece_of_which_only_a_part_is_needed_is_checked_in_full(tmp_path, half):
    folder = save(tmp_path, 1, {"model": Holder({"w": torch.arange(64.0).reshape(8, 8)})})
    held = {"model": Holder({"w": half})}
    load(folder, held)
    assert torch.equal(half.to_local(), torch.arange(32.0).reshape(4, 8))
    flip(folder / "model.safetensors")  # in a row of the other rank
    with pytest.raises(DamagedFileError, match=r"model\.safetensors.* has changed since"):
        load(folder, held)
    load(folder, held, is_verified=True)
