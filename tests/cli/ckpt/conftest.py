"""A run with two checkpoints, and one of the Hugging Face Trainer's."""

import json

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.sample import sample_states
from plugins.mindspore.real import copied, real  # noqa: F401 - fixtures
from surefoot.checkpoint.saving.preparation import save


@pytest.fixture
def folder(tmp_path):
    """The newest checkpoint of a run of ours."""
    for step in (5, 1000):
        history = [{"step": step, "loss": 2.5 / step}, {"step": step, "eval_loss": step / 10}]
        state = {"log_history": history, "best_global_step": 5}
        companions = {"trainer_state.json": json.dumps(state).encode()}
        companions["config.json"] = b'{"model_type": "llama"}'
        companions["recipe.yaml"] = f"checkpoint: {{keep: 3, save_steps: {step}}}".encode()
        found = save(
            tmp_path / "run",
            step,
            sample_states(seed=step),
            kind="full",
            companions=companions,
            parent="checkpoint-5" if step > 5 else None,
        )
    return found


@pytest.fixture
def theirs(tmp_path):
    """A folder as the Hugging Face Trainer leaves it, NaN and pickles included."""
    made = tmp_path / "trainer" / "checkpoint-30"
    made.mkdir(parents=True)
    save_file({"model.norm.weight": torch.arange(6.0)}, made / "model.safetensors")
    (made / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (made / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    state = {
        "global_step": 30,
        "best_model_checkpoint": "/elsewhere/trainer/checkpoint-30",
        "log_history": [
            {"step": 20, "loss": 1.25, "grad_norm": float("nan")},
            {"step": 20, "eval_loss": 0.75},
            {"step": 30, "eval_loss": 0.5},
        ],
    }
    (made / "trainer_state.json").write_text(json.dumps(state))
    return made
