"""What goes wrong in other trainers, by the name under which their users report it."""

import json
import logging
import os
import shutil
import stat
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import small
import surefoot
from each import some
from project import Project, assert_same, checkpoints, final_weights, losses
from surefoot.checkpoint.disk.commit import committed
from surefoot.data.store.dataset import EncodedDataset
from surefoot.errors import RecipeError, RunError
from surefoot.training.callback import TrainerCallback
from surefoot.training.control import EarlyStop


def steps(run):
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(run)]


def test_a_run_that_an_earlier_version_began_goes_on(tmp_path):
    """Its recipe has a setting that this version no longer has; what the setting said, holds."""
    project = Project(tmp_path, train={"max_steps": 3})
    surefoot.train(project.recipe)
    kept = project.run / "recipe.yaml"
    text = kept.read_text()
    kept.write_text(text.replace("train:\n", "train:\n  hub: modelscope\n"))
    with pytest.raises(RecipeError, match=r"recipe.yaml:\d+:3 train\.hub: unknown key"):
        surefoot.train(project.recipe, train={"max_steps": 6})
    kept.write_text(text.replace("train:\n", "train:\n  hub: huggingface\n"))
    surefoot.train(project.recipe, train={"max_steps": 6})
    assert steps(project.run) == [3, 6]
    assert list(losses(project.run)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.proof
def test_a_half_written_newest_folder_is_not_chosen_for_resume(tmp_path):
    """transformers#35782: the newest name wins, whatever is in it, and every restart fails."""
    project = Project(tmp_path, train={"max_steps": 6})
    surefoot.train(project.recipe)
    half = project.run / "checkpoint-9"
    half.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(project.run / "checkpoint-6" / name, half)
    state = surefoot.train(project.recipe, train={"max_steps": 12})
    assert state.global_step == 12
    assert sorted(losses(project.run)) == list(range(1, 13))
    assert (project.run / "checkpoint-9.damaged" / "config.json").exists()


def evaluated(tmp_path, **train):
    return Project(
        tmp_path,
        data={"val_size": 6},
        train={"max_steps": 10, "eval_steps": 1, "load_best_model_at_end": True, **train},
        optim={"adamw": {"learning_rate": 1.0, "schedule": "constant"}},
        checkpoint={"save_steps": 5, "keep": 1},
    )


def best_and_last(project):
    logged = [json.loads(r) for r in (project.run / "metrics.jsonl").read_text().splitlines()]
    values = {r["step"]: r["eval_loss"] for r in logged if "eval_loss" in r}
    return min(values, key=values.get), max(values)


def test_the_best_model_is_saved_at_its_step_and_stays_the_best_when_the_run_moves(tmp_path):
    """transformers#28539, #39560: a best step that is no multiple of save_steps was never saved,
    another one is loaded. best_model_checkpoint is a path in the Trainer: after a move it leads
    nowhere. And with save_total_limit=1 and a best model, the last checkpoint is deleted: no way to
    train on."""
    project = evaluated(tmp_path / "a")
    state = surefoot.train(project.recipe)
    best, last = best_and_last(project)
    assert best % 5 != 0, "choose another seed: this case shows nothing"
    assert steps(project.run) == sorted({best, last})
    assert state.best_global_step == best
    shutil.move(project.run, tmp_path / "moved")
    project.sections["train"]["output_dir"] = str(tmp_path / "moved")
    project.sections["train"]["max_steps"] = 12
    project.write()
    state = surefoot.train(project.recipe)  # its last checkpoint was not deleted at the end
    assert state.global_step == 12
    assert state.best_global_step == best_and_last(project)[0]
    told = json.loads((checkpoints(project.run)[-1] / "trainer_state.json").read_text())
    assert told["best_model_checkpoint"] == str(tmp_path / "moved" / f"checkpoint-{best}")


def test_a_callback_added_on_resume_does_not_end_the_run(tmp_path):
    """A stateful callback that the checkpoint does not know is a KeyError at the first save."""
    small.trainer(tmp_path, save_steps=4, max_steps=4).fit()
    stop = EarlyStop(100)
    options = {"evals": small.examples(2), "eval_steps": 2}
    resumed = small.resume(small.trainer(tmp_path, stop, **options), tmp_path / "checkpoint-4")
    resumed.fit()
    assert (tmp_path / "checkpoint-8").is_dir()


def test_a_callback_taken_away_on_resume_does_not_end_the_run(tmp_path):
    options = {"evals": small.examples(2), "eval_steps": 2}
    small.trainer(tmp_path, EarlyStop(100), save_steps=4, max_steps=4, **options).fit()
    small.resume(small.trainer(tmp_path, **options), tmp_path / "checkpoint-4").fit()
    assert (tmp_path / "checkpoint-8").is_dir()


def test_a_rolled_back_run_does_not_pick_up_the_abandoned_later_steps(tmp_path):
    """Resumed from step 4, killed after 8: the Trainer goes on from 12, of the run given up."""
    project = Project(tmp_path, checkpoint={"save_steps": 4, "keep": None})
    surefoot.train(project.recipe)
    back = str(project.run / "checkpoint-4")
    with pytest.raises(
        RunError, match=r"later checkpoints than checkpoint-4 \(up to checkpoint-12"
    ):
        surefoot.train(project.recipe, checkpoint={"resume": back})
    other = {"output_dir": str(tmp_path / "other"), "max_steps": 8}
    surefoot.train(project.recipe, checkpoint={"resume": back}, train=other)
    state = surefoot.train(project.recipe, train={**other, "max_steps": 10})
    assert state.global_step == 10
    assert steps(tmp_path / "other") == [8, 10]
    assert steps(project.run) == [4, 8, 12]


@pytest.mark.proof
@pytest.mark.parametrize("kind", [pytest.param("mixtral", marks=pytest.mark.proof), "qwen3_moe"])
def test_the_experts_of_a_mixture_are_not_lost_between_disk_and_module_names(tmp_path, kind):
    """transformers#43701: the file has other names than the module, and experts stay random."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 16, "pad_token_id": 0}

    def model():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()

    whole = small.trainer(tmp_path / "whole", model=model(), save_steps=4)
    whole.fit()
    resumed = small.trainer(tmp_path / "resumed", model=model(), save_steps=4)
    for parameter in resumed.policy.module.parameters():
        parameter.data.normal_()  # what is not restored would show
    small.resume(resumed, tmp_path / "whole" / "checkpoint-4").fit()
    small.assert_same_weights(small.weights(whole), small.weights(resumed))
    (tmp_path / "whole" / "checkpoint-8" / "config.json").write_text(
        json.dumps(whole.policy.module.config.to_dict())
    )
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-8")
    small.assert_same_weights(opened.state_dict(), small.weights(whole))


@pytest.mark.proof
def test_tied_weights_are_stored_once_and_loaded_without_a_warning(tmp_path, caplog):
    """A warning at every resume teaches users to ignore the one that matters."""
    project = Project(tmp_path, kind="qwen2", train={"max_steps": 3})
    surefoot.train(project.recipe)
    assert "lm_head.weight" not in final_weights(project.run)
    caplog.clear()
    surefoot.train(project.recipe, train={"max_steps": 6})
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_resume_does_not_read_the_data_from_the_start(tmp_path, monkeypatch):
    """transformers#26251: hours of skipping batch by batch before the first new step."""
    small.trainer(tmp_path, save_steps=3, max_steps=3).fit()
    resumed = small.trainer(tmp_path, max_steps=4)
    small.resume(resumed, tmp_path / "checkpoint-3")
    read, plain = [], EncodedDataset.__getitem__

    def noted(dataset, index):
        read.append(index)
        return plain(dataset, index)

    monkeypatch.setattr(EncodedDataset, "__getitem__", noted)
    resumed.fit()
    assert len(read) == 2  # 14 examples in fours: the last window of the epoch has two


def test_nan_is_not_written_into_json(tmp_path):
    """NaN and Infinity are no JSON: strict readers refuse the whole file."""

    class Nan(TrainerCallback):
        def on_step_end(self, args, state, control):
            state.log_history.append({"step": state.global_step, "eval_loss": float("nan")})

    small.trainer(tmp_path, Nan(), max_steps=3).fit()
    for folder in committed(tmp_path):
        for path in folder.rglob("*.json"):
            json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))


@pytest.mark.skipif(sys.platform == "win32", reason="no modes there")
@pytest.mark.parametrize("mask", some([0o022, 0o002, 0o077], [0o002]))
def test_files_have_the_modes_the_umask_says(tmp_path, mask):
    """safetensors#782: weights that only their owner can read, whatever the umask."""
    before = os.umask(mask)
    try:
        small.trainer(tmp_path, max_steps=1).fit()
    finally:
        os.umask(before)
    folder = tmp_path / "checkpoint-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~mask
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


def test_the_optimizer_is_never_silently_fresh(tmp_path):
    """A folder without optimizer.pt resumes with a warm-up and no moments, and says nothing."""
    project = Project(tmp_path, train={"max_steps": 6})
    surefoot.train(project.recipe)
    before = final_weights(project.run)
    (project.run / "checkpoint-6" / "optimizer.safetensors").unlink()
    surefoot.train(project.recipe)
    assert (project.run / "checkpoint-6.damaged").is_dir()
    assert_same(final_weights(project.run), before)  # step 6 again, from step 3
