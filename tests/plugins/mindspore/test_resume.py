"""What MindSpore Transformers saved is gone on from: its weights, moments, step and scale."""

import logging
import shutil

import pytest
import torch
from transformers import LlamaConfig

from folders import save_adapter, save_model
from spread import trainer
from surefoot.checkpoint.sources import TensorsInMemory, read_whole
from surefoot.errors import CheckpointError
from surefoot.methods import LoRA
from surefoot.model.numerics import LossScaler
from surefoot.parallel.world import ALONE
from surefoot.plugins.mindspore.naming import to_huggingface
from surefoot.plugins.mindspore.resume import load_mindspore_checkpoint
from surefoot.plugins.mindspore.writing import write_full
from surefoot.run.foreign_resume import detect_trainer

from .real import SOURCES

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
FOLDERS = [*SOURCES, "dp2mp2/unified", "ckpt2_single/checkpoint2", "ckpt2_dp2mp2/checkpoint2"]
BATCH = {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 40}  # as theirs was
SLOTS = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}


def fresh(tmp_path, **train):
    """A trainer of the model that the real files are of."""
    return trainer(ALONE, tmp_path / "run", train={**BATCH, **train}, **SIZES)


def resumed(folder, made):
    load_mindspore_checkpoint(folder, made, base=folder)
    return made


def in_one_folder(truth, tmp_path, **changes):
    """The real tensors as one folder; None leaves one out."""
    numbers = {"step_num": torch.tensor(20), "global_batch_size": torch.tensor(8)}
    tensors = {name: t for name, t in {**truth, **numbers, **changes}.items() if t is not None}
    write_full(TensorsInMemory(tensors), tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_moments_and_step_are_those_that_mindspore_saved(
    real,
    truth,
    tmp_path,
    name,
):
    made = resumed(real / name, fresh(tmp_path))
    cut = {n: t for n, t in truth.items() if n.startswith(("adam_", "model.", "lm_head."))}
    wanted = to_huggingface(TensorsInMemory(cut), "legacy")
    for ours, tensor in made.policy.weights.state_dict().items():
        assert torch.equal(tensor, read_whole(wanted, ours))
    moments = made.policy.optimizer_state.state_dict()
    assert len(moments) == 21
    for ours, slots in moments.items():
        assert slots["step"] == 20
        for prefix, slot in SLOTS.items():
            assert torch.equal(slots[slot], read_whole(wanted, f"{prefix}.{ours}"))
    assert made.state.global_step == 20
    assert (made.windows.loader.epoch, made.windows.loader.window) == (10, 0)


def test_ranks_without_strategy_files_are_resumed_by_the_configuration_of_the_model(
    copied, tmp_path
):
    """Its weights are not needed: the file of their documentation names none."""
    folder = copied("dp2mp2")
    expected = dict(resumed(folder, fresh(tmp_path)).policy.weights.state_dict())
    shutil.rmtree(folder / "strategy")
    (folder / "config.json").unlink()
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "base")
    made = fresh(tmp_path)
    load_mindspore_checkpoint(folder, made, base=tmp_path / "base")
    for name, tensor in made.policy.weights.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_another_batch_size_is_another_step_after_as_many_examples(real, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    made = resumed(real / "mp4", fresh(tmp_path, global_batch_size=4))
    assert made.state.global_step == 40
    assert "MindSpore's step 20 with 8 examples per step is step 40 with 4 examples" in caplog.text
    assert next(iter(made.policy.optimizer_state.state_dict().values()))["step"] == 20


def test_what_does_not_come_along_is_said(real, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    resumed(real / "single", fresh(tmp_path))
    assert "single: its learning rate is 0.001; the next one here is" in caplog.text
    assert "in Surefoot's order; MindSpore's folders contain neither their order" in caplog.text


def test_the_scale_of_fp16_comes_along(truth, tmp_path):
    folder = in_one_folder(truth, tmp_path, loss_scale=torch.tensor(4096.0))
    made = fresh(tmp_path)
    made.policy.step.scaler = LossScaler(enabled=True)  # as on a GPU
    assert resumed(folder, made).policy.step.scaler.scale == 4096.0


def test_updates_that_overflowed_are_said(truth, tmp_path, caplog):
    folder = in_one_folder(truth, tmp_path, global_step=torch.tensor([17], dtype=torch.int32))
    made = resumed(folder, fresh(tmp_path))
    assert "the optimizer has made 17 updates in 20 steps" in caplog.text
    assert next(iter(made.policy.optimizer_state.state_dict().values()))["step"] == 17


EMBEDDING = "model.tok_embeddings.embedding_weight"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({f"adam_v.{EMBEDDING}": None}, "contains no moments of model.embed_tokens.weight, which"),
        ({EMBEDDING: torch.zeros(31, 16)}, "is of shape [31, 16] in it, of shape [32, 16] in this"),
        ({EMBEDDING: None}, "model.embed_tokens.weight is missing in it"),
        ({"step_num": None, "global_step": None}, "contains neither step_num nor global_step"),
    ],
)
def test_what_is_not_enough_is_refused_and_nothing_changed(truth, tmp_path, changes, problem):
    folder, made = in_one_folder(truth, tmp_path, **changes), fresh(tmp_path)
    before = {name: tensor.clone() for name, tensor in made.policy.weights.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        resumed(folder, made)
    assert problem in str(caught.value)
    after = made.policy.weights.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert made.state.global_step == 0


def test_an_adapter_has_no_moments_there(truth, tmp_path):
    made = trainer(ALONE, tmp_path / "run", method=LoRA(rank=2), train=BATCH, **SIZES)
    with pytest.raises(CheckpointError, match=r"set method to full, or remove checkpoint.resume"):
        resumed(in_one_folder(truth, tmp_path), made)


def test_weights_alone_are_nothing_to_go_on_from(tmp_path):
    model = save_model(tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter")
    for folder, setting in ((model, "model.path"), (adapter, "model.adapter")):
        with pytest.raises(CheckpointError) as caught:
            detect_trainer(folder, trust_pickle=False, pp=1)
        assert "without training state, so it cannot be resumed" in str(caught.value)
        assert f"set {setting}={folder}" in str(caught.value)
