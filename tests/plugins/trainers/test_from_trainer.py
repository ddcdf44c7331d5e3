"""What a checkpoint of the Trainer must hold, and what is refused or said."""

import json
import logging
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from theirs import HALF, STEPS, policy_of, recipe_in, their_trainer

from folders import edit_json
from surefoot.checkpoint.disk.commit import step_of
from surefoot.errors import CheckpointError
from surefoot.methods import Full, LoRA
from surefoot.optim._variants.adamw import AdamW
from surefoot.plugins.trainers.from_trainer import load_trainer_checkpoint
from surefoot.plugins.trainers.trainer_folder import is_trainer_checkpoint
from surefoot.run.training_run import build


@pytest.fixture
def theirs(full, tmp_path):
    """A copy of the checkpoint, to break."""
    return shutil.copytree(full.theirs, tmp_path / full.theirs.name)


@pytest.fixture
def adapter(lora, tmp_path):
    return shutil.copytree(lora.theirs, tmp_path / "adapter" / lora.theirs.name)


def trainer_of(both, tmp_path, **sections):
    recipe = replace(both.recipe, train=replace(both.recipe.train, output_dir=tmp_path / "run"))
    return build(replace(recipe, **sections))


@pytest.fixture(scope="module")
def trainer(runs, tmp_path_factory):
    """To refuse a checkpoint; nothing of it has changed then."""
    return trainer_of(runs("full"), tmp_path_factory.mktemp("run"))


def load(folder, trainer, *, trust_pickle=True):
    load_trainer_checkpoint(folder, trainer, trust_pickle=trust_pickle)
    return trainer


def refusal(folder, trainer, **options):
    """Why ``folder`` is refused; nothing of the trainer has changed then."""
    before = {name: p.detach().clone() for name, p in trainer.policy.module.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load(folder, trainer, **options)
    for name, parameter in trainer.policy.module.named_parameters():
        assert torch.equal(before[name], parameter), name
    assert not trainer.policy.step.optimizer.state
    assert trainer.state.global_step == 0
    return str(caught.value)


def edit_pickle(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def test_pickles_are_not_opened_without_the_users_word(full, trainer):
    said = refusal(full.theirs, trainer, trust_pickle=False)
    assert "optimizer.pt and scheduler.pt are pickles" in said
    assert "--trust-pickle" in said


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt"])
def test_a_hostile_pickle_is_an_error_and_does_not_run(theirs, tmp_path, name, trainer):
    trace = tmp_path / "trace"
    torch.save({"state": {0: Evil(trace)}, "param_groups": [Evil(trace)]}, theirs / name)
    torch.load(theirs / name, weights_only=False)
    assert trace.exists(), "it is one"
    trace.unlink()
    said = refusal(theirs, trainer)
    assert f"{theirs / name}: it is damaged, or contains more than tensors and plain values" in said
    assert not trace.exists()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_torn_pickle_is_an_error(theirs, keep, trainer):
    path = theirs / "optimizer.pt"
    os.truncate(path, int(path.stat().st_size * keep))
    assert "optimizer.pt: it is damaged" in refusal(theirs, trainer)


def test_the_optimizer_never_starts_afresh_in_silence(full, lora, theirs, adapter, tmp_path):
    for both, folder, field in ((full, theirs, "path"), (lora, adapter, "adapter")):
        (folder / "optimizer.pt").unlink()
        said = refusal(folder, trainer_of(both, tmp_path))
        assert "no optimizer.pt (saved with save_only_model?)" in said
        assert f"remove checkpoint.resume and set model.{field}={folder}" in said


def test_a_save_that_was_cut_short_is_told(theirs, trainer):
    (theirs / "trainer_state.json").write_text('{"global_step": 4, "ep')
    assert "trainer_state.json: not valid JSON" in refusal(theirs, trainer)
    (theirs / "trainer_state.json").unlink()
    assert is_trainer_checkpoint(theirs)
    assert "the save was interrupted" in refusal(theirs, trainer)


def test_missing_or_pickled_weights_are_told(theirs, trainer):
    (theirs / "model.safetensors").unlink()
    assert "it contains no weights (model.safetensors or" in refusal(theirs, trainer)
    torch.save({}, theirs / "pytorch_model.bin")
    assert "Convert it once" in refusal(theirs, trainer)


@pytest.mark.parametrize("name", ["latest", "pytorch_model_fsdp.bin"])
def test_sharded_states_are_refused_by_name(theirs, name, trainer):
    (theirs / name).touch()
    said = refusal(theirs, trainer)
    assert f"its {name} is the sharded state of a" in said


def test_sharded_weights_come_over_like_whole_ones(full, theirs, tmp_path):
    weights = load_file(theirs / "model.safetensors")
    names = sorted(weights)
    parts = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, theirs / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, own in parts.items() for n in own}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    (theirs / "model.safetensors").unlink()
    found = load(theirs, trainer_of(full, tmp_path)).policy.weights.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_another_model_is_refused(theirs, trainer):
    weights = load_file(theirs / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    said = refusal(theirs, trainer)
    assert f"{name} is of shape [47, 32] in it, of shape [48, 32] in this run" in said


def test_a_model_is_no_adapter_and_an_adapter_no_model(full, lora, tmp_path):
    said = refusal(full.theirs, trainer_of(full, tmp_path, method=LoRA()))
    assert "contains a full model, but the recipe's method trains an adapter" in said
    said = refusal(lora.theirs, trainer_of(full, tmp_path, method=Full()))
    assert "set method to lora" in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": 16.0}, "lora_alpha is 8 in it and 16.0 in this run; set method.lora.alpha"),
        ({"rslora": True}, "use_rslora is False in it and True in this run"),
        ({"rank": 2, "alpha": 8.0}, "r 4 in it, 2 here"),
        ({"targets": ("q_proj",)}, "in it, ['q_proj'] here"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(lora, tmp_path, settings, words):
    method = replace(lora.recipe.method, **settings)
    assert words in refusal(lora.theirs, trainer_of(lora, tmp_path, method=method))


def test_embeddings_that_peft_adds_to_an_adapter_must_be_the_bases(lora, adapter, tmp_path):
    weights = load_file(adapter / "adapter_model.safetensors")
    trainer = trainer_of(lora, tmp_path)
    name = "base_model.model.model.embed_tokens.weight"
    weights[name] = trainer.policy.module.state_dict()[name].clone()
    save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
    assert load(adapter, trainer).state.global_step == HALF
    weights[name][0] += 1
    save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
    said = refusal(adapter, trainer_of(lora, tmp_path))
    assert f"{name} is of shape [259, 32] in it, missing in this run" in said


def test_an_adapter_that_changed_its_base_is_refused(lora, adapter, tmp_path):
    edit_json(adapter / "adapter_config.json", init_lora_weights="pissa")
    assert "changed the base" in refusal(adapter, trainer_of(lora, tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c["param_groups"][0]["params"].pop(),
            "the moments of 22 and 7 parameters (with decay and without), but 23 and 7",
        ),
        (
            lambda c: c["state"].update({0: c["state"][1], 1: c["state"][0]}),
            "model.embed_tokens.weight: its exp_avg is [32, 32], expected [259, 32]",
        ),
        (lambda c: c["state"].clear(), "it contains no moments"),
        (lambda c: c["state"].pop(3), "it is trainable, but has no moments"),
        (lambda c: c["state"][0].pop("exp_avg_sq"), "expected exp_avg, exp_avg_sq, step"),
        (lambda c: c.pop("param_groups"), "it is not the state of a torch optimizer"),
        (lambda c: c["state"][0].update(step=torch.tensor(9.0)), "has made 9 updates, but"),
        (lambda c: c["state"][0].update(step="four"), "its step is of type str, expected a tensor"),
        (lambda c: c["state"][0].update(step=torch.ones(2)), "its step is [2], expected []"),
        (lambda c: c["param_groups"][0]["params"].append([1]), "is not the state of a torch"),
    ],
)
def test_an_optimizer_file_that_cannot_be_is_refused(theirs, change, words, trainer):
    edit_pickle(theirs / "optimizer.pt", change)
    assert words in refusal(theirs, trainer)


def test_a_folder_of_another_step_than_its_name_is_refused(theirs, tmp_path, trainer):
    renamed = theirs.rename(tmp_path / "checkpoint-9")
    assert "of step 4, but the folder is checkpoint-9" in refusal(renamed, trainer)


@pytest.mark.parametrize("settings", [torch.ones(2), "much", None, [torch.ones(2)]])
def test_settings_that_are_no_numbers_are_not_compared(full, theirs, tmp_path, settings):
    edit_pickle(
        theirs / "optimizer.pt", lambda c: c["param_groups"][0].update(betas=settings, eps=settings)
    )
    edit_pickle(theirs / "scheduler.pt", lambda c: c.update(last_epoch=settings, _last_lr=settings))
    assert load(theirs, trainer_of(full, tmp_path)).state.global_step == HALF


@pytest.mark.parametrize(
    "changes",
    [
        {"global_step": "4"},
        {"global_step": True},
        {"global_step": 4.5},
        {"global_step": -4},
        {"epoch": None},
        {"log_history": {"step": 1}},
        {"log_history": [1]},
        {"max_steps": [8]},
    ],
    ids=str,
)
def test_a_state_that_cannot_be_is_refused(theirs, changes, trainer):
    edit_json(theirs / "trainer_state.json", **changes)
    assert f"trainer_state.json: {next(iter(changes))} must be" in refusal(theirs, trainer)


def test_differences_that_are_the_users_to_make_are_said(full, theirs, tmp_path, caplog):
    edit_pickle(theirs / "scheduler.pt", lambda c: c.update(last_epoch=3))
    optim = AdamW(learning_rate=0.01, weight_decay=0.2, beta2=0.95)
    section = replace(full.recipe.train, max_steps=20)
    recipe = replace(full.recipe, train=section)
    load(theirs, trainer_of(replace(full, recipe=recipe), tmp_path, optim=optim))
    for words in (
        "scheduler.pt is at step 3, trainer_state.json at 4",
        "the Trainer was to make 8 steps, this run makes",
        "optim.adamw.beta1, beta2 was (0.9, 0.999) and is (0.9, 0.95) now",
        "optim.adamw.weight_decay was 0.1 and is 0.2 now",
        "the Trainer's next learning rate was 0.0015; it is",
    ):
        assert words in caplog.text


def test_what_an_adapter_had_around_it_is_said(lora, adapter, tmp_path, caplog):
    edit_json(
        adapter / "adapter_config.json", lora_dropout=0.3, base_model_name_or_path="org/other"
    )
    load(adapter, trainer_of(lora, tmp_path))
    assert "the adapter was trained on org/other, this run's base is" in caplog.text
    assert "lora_dropout was 0.3 and is 0.0 now" in caplog.text


def test_vectors_that_only_the_trainer_lets_decay_are_said(tmp_path, caplog):
    method = {"lora": {"rank": 2, "dora": True}}
    recipe = recipe_in(tmp_path, method=method)
    build(recipe).policy.module.save_pretrained(tmp_path / "start")
    model = policy_of(recipe, tmp_path / "start")
    their_trainer(recipe, tmp_path / "theirs", model=model).train()
    load(tmp_path / "theirs" / "checkpoint-4", build(recipe))
    assert "weight decay: 21 parameters differ from the Trainer's" in caplog.text
    assert "lora_magnitude_vector" in caplog.text


def test_moments_go_with_adamw_only(full, tmp_path):
    trainer = trainer_of(full, tmp_path)
    trainer.policy.step.optimizer = torch.optim.SGD(
        trainer.policy.step.optimizer.param_groups, lr=0.1
    )
    said = refusal(full.theirs, trainer)
    assert "contains AdamW's moments, but the recipe's optimizer is SGD" in said


def test_nothing_is_said_where_nothing_differs(both, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "surefoot.plugins.trainers"):
        load(both.theirs, trainer_of(both, tmp_path))
    assert not [each for each in caplog.records if each.name.startswith("surefoot.plugins")]


def test_what_the_trainer_knew_of_itself_comes_over(full, theirs, tmp_path):
    edit_json(
        theirs / "trainer_state.json",
        best_metric=1.5,
        best_global_step=2,
        num_input_tokens_seen=123,
        total_flos=4.5e9,
    )
    trainer = load(theirs, trainer_of(full, tmp_path))
    state = trainer.state
    assert (state.global_step, state.epoch) == (HALF, pytest.approx(HALF * 2 / 11))
    assert (state.best_metric, state.best_global_step) == (1.5, 2)
    assert (state.num_input_tokens_seen, state.total_flos) == (123, 4.5e9)
    assert [r["step"] for r in state.log_history] == [1, 2, 3, 4]
    assert state.train_loss_total == pytest.approx(sum(full.their_losses[i] for i in (1, 2, 3, 4)))
    assert state.max_steps == STEPS
    assert (trainer.windows.loader.epoch, trainer.windows.loader.window) == (0, HALF)


def test_numbers_that_json_has_no_word_for_come_over(full, theirs, tmp_path):
    text = (theirs / "trainer_state.json").read_text()
    text = text.replace('"best_metric": null', '"best_metric": Infinity')
    (theirs / "trainer_state.json").write_text(
        text.replace('"grad_norm": ', '"grad_norm": NaN, "x": ')
    )
    trainer = load(theirs, trainer_of(full, tmp_path))
    assert trainer.state.best_metric is None
    with trainer.saver:
        trainer.save()
        assert [step_of(path) for path in trainer.saver.wait()] == [HALF]


def test_a_best_that_could_not_be_loaded_at_the_end_is_looked_for_anew(full, theirs, tmp_path):
    edit_json(theirs / "trainer_state.json", best_metric=1.5, best_global_step=2)
    trainer = trainer_of(full, tmp_path)
    section = replace(trainer.section, load_best_model_at_end=True)
    trainer = replace(trainer, section=section)
    load(theirs, trainer)
    trainer.settle_best()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (None, None)


def test_the_scale_of_fp16_comes_over(full, theirs, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))  # it keeps no state before its first use
    torch.save({**scaler.state_dict(), "_growth_tracker": 7}, theirs / "scaler.pt")
    trainer = trainer_of(full, tmp_path)
    trainer.policy.step.scaler.enabled = True
    load(theirs, trainer)
    assert (trainer.policy.step.scaler.scale, trainer.policy.step.scaler.calm_steps) == (512.0, 7)


@pytest.mark.parametrize(
    ("step", "epoch", "place"),
    [
        (4, 4 * 2 / 11, (0, 4)),  # windows as ours: just the step
        (6, 1.0, (1, 0)),
        (11, 1 + 5 * 2 / 11, (1, 5)),
        (4, 4 / 22, (0, 1)),  # one example a step: by the share of the epoch
        (33, 1.5, (1, 3)),
    ],
)
def test_the_place_in_the_epoch_is_kept_in_examples(full, theirs, tmp_path, step, epoch, place):
    folder = theirs.rename(tmp_path / f"checkpoint-{step}")
    edit_json(folder / "trainer_state.json", global_step=step, epoch=epoch)
    trainer = load(folder, trainer_of(full, tmp_path))
    assert (trainer.windows.loader.epoch, trainer.windows.loader.window) == place


def test_an_order_that_is_not_the_trainers_is_said(full, theirs, tmp_path, caplog):
    data = replace(full.recipe.data, shuffle=True)
    with caplog.at_level(logging.INFO):
        load(theirs, trainer_of(full, tmp_path, data=data))
    said = "the data resumes in epoch 1 after 16 of its 22 examples; their order is Surefoot's"
    assert said in caplog.text


def test_the_first_checkpoint_has_the_trainers_as_its_parent(full, tmp_path):
    trainer = load(full.theirs, trainer_of(full, tmp_path))
    saver = replace(trainer.saver, resumed_from=full.theirs, is_foreign=True)
    replace(trainer, saver=saver).fit()
    manifest = json.loads((tmp_path / "run" / "checkpoint-8" / "manifest.json").read_text())
    assert manifest["parent"] == full.theirs.name


def test_folders_of_others_are_told_apart_by_name(full, lora, tmp_path):
    assert is_trainer_checkpoint(full.theirs)
    assert is_trainer_checkpoint(lora.theirs)
    assert not is_trainer_checkpoint(full.ours)
    assert not is_trainer_checkpoint(tmp_path)
