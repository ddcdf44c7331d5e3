"""The folder that the Trainer goes on from."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from theirs import HALF, furthest, policy_of, recipe_in, their_trainer, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from transformers.training_args import ParallelMode

import tiny
from surefoot.checkpoint.disk.manifest import dump, parse
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.state.states import RandomState
from surefoot.errors import CheckpointError, ModelError
from surefoot.model.numerics import seed_everything
from surefoot.plugins.trainers.from_trainer import load_trainer_checkpoint
from surefoot.plugins.trainers.to_trainer import save_trainer_checkpoint
from surefoot.run.training_run import build


def convert(both, folder, **changes):
    given = {"recipe": both.recipe, "base": both.base, **changes}
    given["run"] = given.pop("recipe")
    save_trainer_checkpoint(both.ours, folder, **given)
    return folder


def test_it_holds_what_the_trainer_writes_and_no_more_pickles_than_it_needs(both, tmp_path):
    found = {p.name for p in convert(both, tmp_path / "out").iterdir()}
    needless = {"training_args.bin", "README.md"}
    assert {p.name for p in both.theirs.iterdir()} - needless <= found
    assert {name for name in found if name.endswith((".pt", ".pth", ".bin"))} == {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    }
    assert "manifest.json" not in found, "it is no checkpoint of ours"
    assert not list(tmp_path.glob(".*")), "nothing is left aside"


def test_it_opens_as_a_model_or_an_adapter(both, tmp_path):
    folder = convert(both, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    if both.base is None:
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(both.base), folder)
    was, now = (open_folder(f).shapes() for f in (both.ours, folder))
    assert was == now
    assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_steps_of_logs_and_saves_are_numbers_the_trainer_can_divide_by(full, tmp_path):
    quiet = replace(full.recipe.train, log_steps=None)
    recipe = replace(full.recipe, train=quiet)
    state = json.loads(
        (convert(full, tmp_path / "out", recipe=recipe) / "trainer_state.json").read_text()
    )
    assert (state["logging_steps"], state["eval_steps"], state["save_steps"]) == (500, 500, HALF)


def test_a_rate_that_follows_evaluations_goes_over_and_comes_back(tmp_path):
    """torch's own scheduler, as the Trainer makes it, continues with the metrics of our run."""
    plateau = {"factor": 0.5, "patience": 0, "threshold": 0.9}
    rates = {"learning_rate": 0.003, "schedule": "reduce_lr_on_plateau", "min_lr_ratio": 0.2}
    recipe = recipe_in(
        tmp_path,
        train={"eval_steps": 1},
        data={"val_size": 4},
        optim={"adamw": {**rates, "plateau": plateau}},
    )
    ours = build(recipe)
    ours.fit()
    saved = recipe.train.output_dir / f"checkpoint-{HALF}"
    folder = tmp_path / f"checkpoint-{HALF}"
    save_trainer_checkpoint(saved, folder, run=recipe)
    theirs = their_trainer(recipe, tmp_path / "theirs", eval_dataset=[{}])
    theirs.create_optimizer_and_scheduler(8)
    scheduler = theirs.lr_scheduler
    assert type(scheduler) is torch.optim.lr_scheduler.ReduceLROnPlateau
    theirs.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
    history = ours.state.log_history
    losses = {r["step"]: r["eval_loss"] for r in history if "eval_loss" in r}
    used = {r["step"]: r["learning_rate"] for r in history if "learning_rate" in r}
    assert len(set(used.values())) > 2
    for step in range(HALF + 1, 9):
        assert scheduler.get_last_lr()[0] == pytest.approx(used[step], rel=1e-9), step
        scheduler.step(losses[step])

    again = build(replace(recipe, train=replace(recipe.train, output_dir=tmp_path / "again")))
    load_trainer_checkpoint(folder, again, trust_pickle=True)
    again.fit()
    history = again.state.log_history
    assert used == {r["step"]: r["learning_rate"] for r in history if "learning_rate" in r}


def test_the_trainer_draws_the_dropout_that_the_run_would_have_drawn(tmp_path):
    """One example a step: rows of several are padded there, so the masks have other shapes."""
    recipe = recipe_in(
        tmp_path,
        method={"lora": {"rank": 4, "dropout": 0.5}},
        train={"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 5},
        checkpoint={"save_steps": 1},
    )
    ours = build(recipe)
    ours.policy.module.save_pretrained(tmp_path / "start")
    ours.fit()
    folder, base = recipe.train.output_dir / "checkpoint-4", Path(recipe.model.path)
    save_trainer_checkpoint(folder, tmp_path / "out", run=recipe, base=base)

    def resumed(name):
        model = policy_of(recipe, tmp_path / "start")
        theirs = their_trainer(recipe, tmp_path / name, model=model)
        theirs.train(resume_from_checkpoint=str(tmp_path / "out"))
        return furthest(weights_of(theirs.model), weights_of(ours.policy.module))

    assert resumed("same") < 1e-6
    (tmp_path / "out" / "rng_state.pth").unlink()
    assert resumed("other") > 1e-4


def test_each_rank_of_the_run_has_its_generators(full, tmp_path):
    """The Trainer sets them by its own reader; a rank alone and rank 0 of several draw the same."""
    ours = shutil.copytree(full.ours, tmp_path / full.ours.name)
    manifest = parse((ours / "manifest.json").read_bytes(), "")
    manifest = replace(manifest, world_size=4, mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 2})
    (ours / "manifest.json").write_bytes(dump(manifest))
    folder = convert(replace(full, ours=ours), tmp_path / "out")
    assert {p.name for p in folder.glob("rng_*")} == {
        "rng_state.pth",
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    theirs, before = their_trainer(full.recipe, tmp_path / "theirs"), RandomState()
    saved, drawn = before.state_dict(), []
    for count, rank in ((1, 0), (2, 0), (2, 1)):
        theirs.args = SimpleNamespace(
            world_size=count, process_index=rank, parallel_mode=ParallelMode.DISTRIBUTED
        )
        theirs._load_rng_state(str(folder))
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        seed_everything(full.recipe.train.seed, HALF, 0, rank)
        assert drawn[-1] == (random.random(), float(np.random.rand()), float(torch.rand(())))
    before.load_state_dict(saved)
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_best_checkpoint_is_named_to_the_trainer(tmp_path):
    sections = {
        "train": {"eval_steps": 2, "load_best_model_at_end": True},
        "data": {"val_size": 4},
    }
    recipe = recipe_in(tmp_path, **sections)
    build(recipe).fit()
    best = json.loads((recipe.train.output_dir / "checkpoint-8" / "trainer_state.json").read_text())
    save_trainer_checkpoint(recipe.train.output_dir / "checkpoint-8", tmp_path / "out", run=recipe)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["best_metric"] == best["best_metric"]
    folder = Path(state["best_model_checkpoint"])
    assert folder.name == f"checkpoint-{state['best_global_step']}"
    assert folder.is_dir()


def test_a_master_copy_stays_here_and_is_made_again_on_the_way_back(tmp_path):
    optim = {"adamw": {"learning_rate": 0.003, "bf16_weights": "master"}}
    recipe = recipe_in(tmp_path, model={"dtype": "bfloat16"}, optim=optim)
    build(recipe).fit()
    ours = recipe.train.output_dir / f"checkpoint-{HALF}"
    save_trainer_checkpoint(ours, tmp_path / "out", run=recipe)
    written = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in written.values())
    again = replace(recipe, train=replace(recipe.train, output_dir=tmp_path / "again"))
    back = build(again)
    load_trainer_checkpoint(tmp_path / "out", back, trust_pickle=True)
    state = back.policy.trained.state_dict()
    assert all(t.dtype == torch.float32 for each in state.values() for t in each.values())
    back.fit()
    assert all("master" in each for each in back.policy.trained.state_dict().values())


def test_the_scale_of_fp16_goes_with_it(full, tmp_path):
    recipe = replace(full.recipe, train=replace(full.recipe.train, precision="fp16"))
    folder = convert(full, tmp_path / "out", recipe=recipe)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(folder / "scaler.pt", weights_only=True))
    assert scaler.get_scale() == 65_536.0  # of a new run of fp16: this one was of fp32


def test_nothing_is_overwritten_and_nothing_half_written_stays(full, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="taken: it exists already"):
        convert(full, tmp_path / "taken")
    broken = replace(full, ours=shutil.copytree(full.ours, tmp_path / full.ours.name))
    path = broken.ours / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"damaged!")
    with pytest.raises(CheckpointError, match="is damaged: its hash does not match"):
        convert(broken, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"taken", full.ours.name}


def test_what_cannot_be_converted_is_told(full, lora, tmp_path):
    with pytest.raises(CheckpointError, match="was never committed"):
        convert(replace(full, ours=full.theirs), tmp_path / "out")
    with pytest.raises(CheckpointError, match="name its base"):
        convert(lora, tmp_path / "out", base=None)
    with pytest.raises(CheckpointError, match="does not belong to the parameters"):
        convert(full, tmp_path / "out", recipe=replace(full.recipe, method=freeze()))
    with pytest.raises(ModelError, match="cannot load the model: Unrecognized"):
        convert(lora, tmp_path / "out", base=tmp_path)


def freeze():
    from surefoot.methods import Freeze

    return Freeze(num_layers=1)


def test_dropout_rank_and_bias_of_every_kind_of_adapter_go_over(tmp_path):
    method = {"lora": {"rank": 2, "dora": True, "rslora": True, "modules_to_save": ["lm_head"]}}
    recipe = recipe_in(tmp_path, kind="qwen3", method=method, train={"max_steps": 2})
    trainer = build(recipe)
    trainer.policy.module.save_pretrained(tmp_path / "start")
    trainer.fit()
    folder, base = recipe.train.output_dir / "checkpoint-2", Path(recipe.model.path)
    save_trainer_checkpoint(folder, tmp_path / "out", run=recipe, base=base)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "start", is_trainable=True
    )
    theirs = their_trainer(recipe, tmp_path / "theirs", model=model, max_steps=3)
    theirs.train(resume_from_checkpoint=str(tmp_path / "out"))
    optimizer = theirs.optimizer.state_dict()["state"]
    assert all(values["step"] == 3 for values in optimizer.values())


def test_experts_go_over_although_files_and_modules_name_them_differently(tmp_path):
    recipe = recipe_in(tmp_path, train={"max_steps": 4}, checkpoint={"save_steps": 1})
    sizes = {**tiny.SIZES, "vocab_size": 259, "num_local_experts": 4, "eos_token_id": 256}
    config = MixtralConfig(**sizes, tie_word_embeddings=False)
    MixtralForCausalLM(config).save_pretrained(recipe.model.path)
    ours = build(recipe)
    ours.fit()
    expected = {n: p.detach().clone() for n, p in ours.policy.module.named_parameters()}
    out = tmp_path / "out"
    save_trainer_checkpoint(recipe.train.output_dir / "checkpoint-2", out, run=recipe)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in set(file.keys())
    theirs = their_trainer(recipe, tmp_path / "theirs")  # from the pretrained model
    theirs.train(resume_from_checkpoint=str(out))
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], atol=2e-6, rtol=0)
    opened = AutoModelForCausalLM.from_pretrained(out)
    started = AutoModelForCausalLM.from_pretrained(recipe.train.output_dir / "checkpoint-2")
    for name, parameter in started.state_dict().items():
        assert torch.equal(parameter, opened.state_dict()[name]), name
    again = build(replace(recipe, train=replace(recipe.train, output_dir=tmp_path / "again")))
    load_trainer_checkpoint(tmp_path / "theirs" / "checkpoint-3", again, trust_pickle=True)
    again.fit()
    for name, parameter in again.policy.module.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], atol=2e-6, rtol=0)
