"""Mixtures of experts over processes learn what one learns; their files know no fused tensor."""

from itertools import product

import pytest
import torch

import ranks
import tiny
from each import some
from spread import compare, learn, resume, save, trainer
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.methods import LoRA
from surefoot.model.weights import FullWeights
from surefoot.parallel.world import ALONE
from test_reshard import CLOSE, assert_bitwise, assert_written_once

UNEVEN = {"vocab_size": 97}
EAGER = {"experts_implementation": "eager"}  # grouped products know no float64
ONES = {"micro_batch_size": 1}
MESHES = [(1, {}), (3, {"dp_shard": 3}), (2, {"tp": 2}), (4, {"tp": 4})]


@pytest.mark.parametrize(
    ("kind", "sequence"),
    some(
        [*product(("mixtral", "qwen3_moe"), (False, True))],
        [("mixtral", False), ("qwen3_moe", True)],
    ),
)
def test_two_share_the_experts(kind, sequence, tmp_path):
    parallel = {"tp": 2, "sequence_parallel": sequence}
    compare(2, tmp_path, parallel=parallel, kind=kind, **UNEVEN)


@pytest.mark.proof
def test_two_by_two_share_them_with_recomputed_activations(tmp_path):
    parallel = {"tp": 2, "sequence_parallel": True}
    changes = {"packing": True, "recompute": True, "train": ONES}
    compare(4, tmp_path, parallel=parallel, kind="mixtral", **changes)


def test_in_float64_only_rounding_is_left(tmp_path):
    changes = {"kind": "qwen3_moe", "dtype": torch.float64, **EAGER}
    compare(2, tmp_path, parallel={"tp": 2}, close=1e-10, **changes)


def test_three_shard_four_experts(tmp_path):
    compare(3, tmp_path, parallel={}, kind="mixtral", train=ONES)


@pytest.mark.filterwarnings("ignore:The following .*_pattern:RuntimeWarning")  # PEFT's own
@pytest.mark.parametrize(
    ("method", "parallel"),
    [(LoRA(rank=2), {}), (LoRA(rank=2, targets=("q_proj", "o_proj")), {"tp": 2})],
    ids=["experts, too", "attention alone"],
)
def test_adapters(method, parallel, tmp_path):
    compare(2, tmp_path, parallel=parallel, kind="mixtral", method=method)


def in_files(folder):
    """All weights, read without a model or a process."""
    source = open_folder(folder)
    return {name: read_whole(source, name) for name in source.shapes()}


def moments(made):
    return {
        f"{name}.{slot}": torch.as_tensor(tensor).clone()
        for name, slots in made.policy.optimizer_state.state_dict().items()
        for slot, tensor in slots.items()
    }


def test_what_one_has_saved_goes_through_any_mesh_unchanged(tmp_path):
    changes = {"kind": "mixtral", "train": ONES, **UNEVEN}
    alone = trainer(ALONE, tmp_path, **changes)
    losses = learn(alone, 2)
    path = save(alone, tmp_path)
    expected, held = in_files(path), moments(alone)
    names = set(FullWeights(tiny.model("mixtral", num_hidden_layers=2)).state_dict())
    assert set(expected) == names, "the names are those of transformers' files"

    def again(world, path):
        folder = path.parent / f"on {world.size}"
        return save(resume(trainer(world, folder, **changes), path), folder)

    for count, parallel in [(4, {"tp": 2}), *MESHES[1:3]]:
        path = ranks.run(count, lambda w, p=path: again(w, p), **parallel)[0]
        assert verify(path, full=True).ok
        assert_written_once(path)
        assert_bitwise(in_files(path), expected)
    other = resume(trainer(ALONE, tmp_path, **changes), path)
    assert_bitwise(moments(other), held)
    assert learn(other, 1) == learn(alone, 1)
    assert losses


@pytest.mark.proof  # above: any mesh reads the same bits, and learns the same
def test_a_run_goes_from_mesh_to_mesh_as_one_process_would(tmp_path):
    changes = {"kind": "qwen3_moe", "train": ONES}
    alone = learn(trainer(ALONE, tmp_path, **changes), 4)
    path, losses = None, []

    def go_on(world, path):
        made = trainer(world, tmp_path / str(world.size), **changes)
        made = resume(made, path) if path else made
        found = learn(made, 1)
        return save(made, tmp_path), found

    for count, parallel in MESHES:
        path, more = ranks.run(count, lambda w, p=path: go_on(w, p), **parallel)[0]
        losses += more
    for step, (ours, theirs) in enumerate(zip(losses, alone, strict=True)):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE), f"step {step}"
