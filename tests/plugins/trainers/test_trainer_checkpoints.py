"""Hugging Face's own Trainer with our checkpoints: a resumed run is the uninterrupted one."""

import json
import logging
import shutil

import peft
import pytest
import torch
from theirs import StopAfter
from torch import nn
from trainer_run import train, trainer, uninterrupted, whole
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import tiny
from each import some
from folders import save_model, tokenizer
from surefoot.checkpoint import CheckpointError, RetentionPolicy, verify
from surefoot.checkpoint.disk.commit import committed
from surefoot.errors import RunError
from surefoot.plugins.trainers.callback import SurefootCheckpoints


def steps(folder):
    return [int(path.name.rpartition("-")[2]) for path in committed(folder)]


def losses(built):
    return {r["step"]: r["loss"] for r in built.state.log_history if "loss" in r}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same_run(one, other):
    assert losses(one) == losses(other)
    assert one.state.global_step == other.state.global_step
    assert one.state.epoch == other.state.epoch
    assert one.state.total_flos == other.state.total_flos
    for part in ("model", "optimizer", "lr_scheduler"):
        states = [getattr(built, part).state_dict() for built in (one, other)]
        assert same(*states), part


def lora(**changes):
    settings = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_dropout": 0.2, **changes}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(tiny.model(), config)


def mixtral():
    """Its experts are fused in memory, and have names of their own in files."""
    torch.manual_seed(0)
    sizes = {**tiny.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, attention_dropout=0.2))


BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
TWICE = {"gradient_accumulation_steps": 2}
CASES = {
    "between saves": {"stop": 5, "is_cut": True},
    "at the end of an epoch": {"stop": 7},
    "second epoch": {"stop": 10},
    "accumulation": {"stop": 5, **TWICE},
    "by length, later epoch": {"stop": 10, **BY_LENGTH},
    "with workers": {"stop": 4, "dataloader_num_workers": 1, "num_train_epochs": 1},
    "plateau": {"stop": 6, **EVERY_TWO, **PLATEAU},
    "lora": {"stop": 4, "make": lora},
    "experts": {"stop": 4, "make": mixtral},
    "tied": {"stop": 4, "make": lambda: tiny.model("qwen2", attention_dropout=0.2)},
}
FEW = ["between saves", "plateau", "lora", "experts"]
PROVEN = {
    "a saved end of an epoch": {"stop": 9, "save_steps": 7, "is_cut": True},
    "accumulation, end of an epoch": {"stop": 4, **TWICE},
    "evaluation": {"stop": 6, **EVERY_TWO},
    "evaluation at the end of epochs": {"stop": 7, "eval_strategy": "epoch"},
}


@pytest.mark.parametrize("case", some([*CASES, *PROVEN], FEW))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, case):
    assert_resumes(tmp_path, **(CASES | PROVEN)[case])


def assert_resumes(folder, *, stop, make=None, is_cut=False, **settings):
    expected = (
        uninterrupted(folder / "whole", model=make(), **settings) if make else whole(**settings)
    )
    stopped = train(folder / "run", model=make and make(), stop=stop, **settings)
    assert stopped.state.global_step == stop
    if is_cut:  # as if it had been killed before the end was saved
        shutil.rmtree(folder / "run" / f"checkpoint-{stop}")
    torch.manual_seed(99)
    resumed = train(folder / "run", model=make and make(), **settings)
    assert_same_run(resumed, expected)


def test_the_scale_of_the_loss_goes_on_as_well(tmp_path):
    """fp16 needs a GPU in the Trainer; torch's scaler itself does not."""

    def scaled(folder, stop=None):
        built, checkpoints = trainer(folder, stop=stop, max_grad_norm=0.0, num_train_epochs=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        prepare = built.accelerator.prepare

        def with_scaler(*parts):
            built.accelerator.scaler = scaler
            return prepare(*parts)

        built.accelerator.prepare = with_scaler
        built.train(resume_from_checkpoint=checkpoints.newest())
        return built, scaler.state_dict()

    alone, expected = scaled(tmp_path / "whole")
    assert expected["scale"] == 4.0 * 2**3
    scaled(tmp_path / "run", stop=3)
    resumed, found = scaled(tmp_path / "run")
    assert found == expected
    assert_same_run(resumed, alone)


def test_the_checkpoint_opens_as_it_lies(tmp_path):
    save_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    args = {"num_train_epochs": 1, "per_device_train_batch_size": 7, "save_strategy": "no"}
    built = Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to=[], **args),
        train_dataset=[{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 14,
        processing_class=tokenizer(),
    )
    SurefootCheckpoints(built, save_steps=100)
    built.train()
    folder = tmp_path / "run" / "checkpoint-2"
    assert verify(folder).ok
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert same(dict(opened.state_dict()), dict(model.state_dict()))
    assert AutoTokenizer.from_pretrained(folder)("Hello").input_ids
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert not [p for p in folder.iterdir() if p.suffix in (".pt", ".pth", ".bin")]


def test_an_adapter_opens_as_it_lies(tmp_path):
    built = train(tmp_path, model=lora(), num_train_epochs=1)
    folder = committed(tmp_path)[-1]
    opened = peft.PeftModel.from_pretrained(tiny.model(), folder)
    trained = peft.get_peft_model_state_dict(built.model)
    assert same(dict(peft.get_peft_model_state_dict(opened)), dict(trained))
    assert not list(folder.glob("model*"))


class Small(nn.Module):
    """A model that is nobody's but the user's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)

    def forward(self, input_ids, labels, attention_mask):
        logits = self.head(nn.functional.dropout(self.embed(input_ids), 0.2))
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels)}


def test_a_plain_module_trains_too(tmp_path):
    assert_resumes(tmp_path, stop=4, make=Small)


def test_a_plain_module_with_ties_is_refused(tmp_path):
    tied = Small()
    tied.head.weight = tied.embed.weight
    with pytest.raises(RunError, match=r"head\.weight is tied"):
        train(tmp_path, model=tied)


def test_the_best_step_is_saved_and_stays(tmp_path):
    def metrics(values):
        left = iter(values)
        return lambda _: {"score": next(left)}

    built, _ = trainer(
        tmp_path,
        keep=RetentionPolicy(keep=1),
        save_steps=100,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    built.compute_metrics = metrics([0.1, 0.2, 0.9, float("nan"), 0.3, 0.4, 0.5])
    built.train()
    assert steps(tmp_path) == [3, 7]
    state = json.loads((tmp_path / "checkpoint-7" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 3
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-3")
    assert "NaN" not in (tmp_path / "checkpoint-7" / "trainer_state.json").read_text()


def test_patience_is_not_forgotten_on_resume(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score"}
    settings |= {"greater_is_better": True, "num_train_epochs": 2}

    def run(stop=None):
        early = EarlyStoppingCallback(early_stopping_patience=4)
        built, checkpoints = trainer(
            tmp_path / "run", callbacks=[early, *([StopAfter(stop)] if stop else [])], **settings
        )
        built.compute_metrics = lambda _: {"score": -float(built.state.global_step)}
        built.train(resume_from_checkpoint=checkpoints.newest())
        return built.state.global_step

    assert run(stop=3) == 3
    assert run() == 5  # one best, four that are worse


def test_a_callback_that_is_new_on_resume_does_no_harm(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    train(tmp_path, stop=4, **settings)
    early = EarlyStoppingCallback(early_stopping_patience=100)
    built = train(tmp_path, callbacks=[early], **settings)
    assert built.state.global_step == 14


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, caplog):
    train(tmp_path / "run", stop=7)
    newest = tmp_path / "run" / "checkpoint-7" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    caplog.set_level(logging.WARNING)
    resumed = train(tmp_path / "run")
    assert "checkpoint-7 failed verification" in caplog.text
    assert_same_run(resumed, whole())


def test_a_save_that_another_callback_asks_for_is_ours(tmp_path):
    class Ask(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 4

    train(tmp_path, callbacks=[Ask()], num_train_epochs=1)
    assert steps(tmp_path) == [3, 4, 6, 7]


def test_it_saves_every_so_many_steps_and_goes_on_elsewhere_from_what_was_checked(tmp_path):
    expected = train(tmp_path / "whole")
    assert steps(tmp_path / "whole") == [3, 6, 9, 12, 14]
    built, checkpoints = trainer(tmp_path / "run", keep=2)
    built.train(resume_from_checkpoint=checkpoints.checked(tmp_path / "whole" / "checkpoint-3"))
    assert_same_run(built, expected)
    assert steps(tmp_path / "run") == [12, 14]
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoints.checked(tmp_path / "whole" / "checkpoint-4")


def test_a_checkpoint_elsewhere_that_nobody_named_is_refused(tmp_path):
    for name in ("one", "two"):
        train(tmp_path / name, stop=3)
    built, _ = trainer(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"checkpoints\.checked\(PATH\)"):
        built.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))


def test_the_trainers_own_search_for_the_newest_works_too(tmp_path):
    train(tmp_path / "run", num_train_epochs=1, stop=4)
    built, _ = trainer(tmp_path / "run", num_train_epochs=1)
    built.train(resume_from_checkpoint=True)
    assert_same_run(built, whole(num_train_epochs=1))


def test_a_checkpoint_of_the_trainers_own_can_be_gone_on_from(tmp_path):
    built, checkpoints = trainer(tmp_path / "theirs", num_train_epochs=1)
    built.remove_callback(checkpoints)
    built.args.save_strategy, built.args.save_steps = "steps", 4
    built.train()
    resumed, checkpoints = trainer(tmp_path / "ours", num_train_epochs=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
    assert_same_run(resumed, built)
    (tmp_path / "theirs" / "checkpoint-4" / "optimizer.pt").unlink()
    again, _ = trainer(tmp_path / "again", num_train_epochs=1)
    with pytest.raises(CheckpointError, match="with a fresh optimizer"):
        again.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))


def test_a_fresh_start_does_not_run_into_an_earlier_run(tmp_path):
    train(tmp_path, stop=3)
    with pytest.raises(RunError, match=r"contains checkpoint-3.*checkpoints\.newest\(\)"):
        train(tmp_path, resume=False)


def test_a_finished_run_can_be_extended(tmp_path):
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    train(tmp_path / "run", num_train_epochs=1, **settings)
    assert_same_run(train(tmp_path / "run", **settings), whole(**settings))


def test_an_interrupted_train_can_be_called_again(tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5 and not self.__dict__.setdefault("failed", False):
                self.failed = True
                raise KeyboardInterrupt

    built, checkpoints = trainer(tmp_path / "run", num_train_epochs=1, callbacks=[Fail()])
    with pytest.raises(KeyboardInterrupt):
        built.train()
    built.train(resume_from_checkpoint=checkpoints.newest())
    expected = whole(num_train_epochs=1)
    assert losses(built) == losses(expected)
    assert same(dict(built.model.state_dict()), dict(expected.model.state_dict()))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"save_strategy": "steps"}, "save_strategy is 'steps'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is on"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint is on"),
    ],
)
def test_settings_that_would_save_twice_are_refused(tmp_path, settings, reason):
    with pytest.raises(RunError, match=reason):
        trainer(tmp_path, **settings)


def test_state_in_several_places_and_no_steps_between_saves_are_refused(tmp_path):
    for name, reason in (
        ("is_deepspeed_enabled", "DeepSpeed"),
        ("is_fsdp_enabled", "FSDP"),
        ("is_distributed_loading_by_transformers", "sharded while it loads"),
    ):
        built, _ = trainer(tmp_path)
        setattr(built, name, True)
        with pytest.raises(RunError, match=f"{reason}: not supported"):
            SurefootCheckpoints(built, save_steps=1)
    built, _ = trainer(tmp_path)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SurefootCheckpoints(built, save_steps=0)


def test_an_adapter_that_its_file_cannot_hold_is_refused(tmp_path):
    model = lora()
    model.base_model.model.lm_head.weight.requires_grad_(True)
    problem = r"1 trainable parameter is not in a PEFT adapter's file .*lm_head\.weight"
    with pytest.raises(RunError, match=problem):
        train(tmp_path, model=model)
    named = peft.get_peft_model(tiny.model(), peft.LoraConfig(target_modules=["q_proj"]), "mine")
    with pytest.raises(RunError, match="the adapters mine: expected one"):
        train(tmp_path, model=named)
    native = tiny.model()
    # as its own add_adapter does, which some versions of transformers refuse for PEFT's newest
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), native)
    native._hf_peft_config_loaded = True
    with pytest.raises(RunError, match="get_peft_model"):
        train(tmp_path, model=native)
