"""A resumed run is bitwise the uninterrupted one: all that a checkpoint contains, on one device.

``tests/training/test_trainer.py`` has more of this for SDPA; its tests marked ``gpu`` belong here.
"""

import pytest
import torch
from safetensors.torch import load_file
from test_attention import KERNELS, kernel_of
from torch.utils import _pytree

import small
import surefoot
import tiny
from each import some
from project import Project, assert_same, checkpoints, losses
from surefoot.checkpoint.state.states import RandomState
from surefoot.methods import Full, LoRA
from surefoot.model import packed_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
METHODS = {"full": Full(), "lora": LoRA(rank=4, dropout=0.2)}
CHANGING = {"trainer", "callbacks", "random"}  # they contain times


def everything(built):
    """Every value of the states of a run, by its path: weights, moments, scale, order of data."""
    states = {n: s.state_dict() for n, s in built.states.items() if n not in CHANGING}
    pairs = _pytree.tree_flatten_with_path(states)[0]
    return {
        _pytree.keystr(path): value.clone() if isinstance(value, torch.Tensor) else value
        for path, value in pairs
    }


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        is_same = torch.equal if isinstance(value, torch.Tensor) else type(value).__eq__
        assert is_same(value, other[path]), path


def resumed_and_whole(folder, make):
    """A run of 8 steps, and one that is resumed from its checkpoint of step 3."""
    whole = make(folder / "whole")
    whole.fit()
    second = make(folder / "second")
    small.resume(second, folder / "whole" / "checkpoint-3")
    torch.rand(7, device=second.policy.network.inner.device)  # what ran before must not matter
    second.fit()
    return second, whole


def run_with(attention, precision, method):
    """Two micro-batches a step; flex has tiles of at least 16."""
    by_name = attention if attention in packed_attention.KERNELS else "sdpa"
    options = {"precision": precision, "method": method}
    if attention not in packed_attention.KERNELS:
        options["attention"] = attention

    def make(folder, *members):
        model = tiny.model("qwen3", attention=by_name, head_dim=16)
        return small.trainer(folder, *members, model=model, **options)

    return make


@pytest.mark.parametrize("method", some(METHODS, ["lora"]))
@pytest.mark.parametrize("attention", KERNELS)
def test_every_kernel_of_packed_rows_resumes_to_the_same_bits(attention, method, device, tmp_path):
    kernel_of(attention, device)
    make = run_with(attention, "bf16", METHODS[method])
    second, whole = resumed_and_whole(tmp_path, make)
    found = everything(second)
    assert any("exp_avg_sq" in path for path in found)
    assert_same_bits(found, everything(whole))
    assert second.state.train_loss_total == whole.state.train_loss_total


def test_a_scale_that_has_changed_is_resumed_and_a_step_that_overflows_is_skipped(tmp_path):
    def make(folder, *members):
        built = run_with("sdpa", "fp16", Full())(folder, *members)
        built.policy.step.scaler.scale = 2.0**34
        built.policy.step.scaler.growth_interval = 2
        return built

    scales = []

    class Scales(small.TrainerCallback):
        def on_step_end(self, args, state, control):
            scales.append(whole.policy.step.scaler.scale)

    whole = make(tmp_path / "watched", Scales())
    whole.fit()
    assert scales[0] == 2.0**33
    second, whole = resumed_and_whole(tmp_path, make)
    assert_same_bits(everything(second), everything(whole))
    assert second.policy.step.scaler.state_dict() == whole.policy.step.scaler.state_dict()


def tensors_of(checkpoint):
    """Every tensor that is in a file of a checkpoint, but the generators of callbacks."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {(f.name, name): t for f in files for name, t in load_file(f).items()}


@pytest.mark.parametrize(
    "stage",
    [pytest.param("sft", marks=pytest.mark.proof), pytest.param("dpo", marks=pytest.mark.proof)],
)
def test_a_recipe_resumes_to_the_same_files(stage, tmp_path):
    """With the kernels that a run selects, dropout, accumulation and background saves."""
    project = Project(
        tmp_path,
        kind="qwen3",
        stage=stage,
        data={"datasets": ["pairs" if stage == "dpo" else "sums"]},
        method={"lora": {"rank": 4, "dropout": 0.1}} if stage == "dpo" else "full",
        train={"max_steps": 6, "output_dir": str(tmp_path / "cut")},
    )
    surefoot.train(project.recipe, callbacks=[small.StopAt(4)])
    surefoot.train(project.recipe)
    surefoot.train(project.recipe, **{"train.output_dir": str(tmp_path / "whole")})
    ours, theirs = (checkpoints(tmp_path / name)[-1] for name in ("cut", "whole"))
    assert ours.name == "checkpoint-6"
    assert_same(tensors_of(ours), tensors_of(theirs))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_the_generator_of_the_device_is_restored(device):
    """Dropout after a resume drops what it would have dropped."""
    x = torch.ones(1000, device=device)
    saved = RandomState().state_dict()
    assert ("cuda" in saved) == (device.type == "cuda")
    expected = torch.nn.functional.dropout(x)
    assert not torch.equal(torch.nn.functional.dropout(x), expected)
    RandomState().load_state_dict(saved)
    assert torch.equal(torch.nn.functional.dropout(x), expected)
