"""A reference is asked once: by one process or two, before the first step or again at a resume."""

import logging
import math
import os
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import ranks
import surefoot
from damage import flip
from project import (
    Project,
    assert_same,
    checkpoints,
    final_weights,
    in_child,
    losses,
    metrics,
    model_folder,
)
from spread import trainer
from surefoot.batch import IGNORE_INDEX
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import join
from surefoot.errors import DataError, ModelError, RecipeError
from surefoot.methods import LoRA
from surefoot.model.tokenizer import load_tokenizer
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from surefoot.run.contexts import eval_set
from surefoot.run.parts import RunParts
from surefoot.stages import DPO
from surefoot.training import TrainerCallback
from surefoot.training.precompute import precomputation, with_items
from surefoot.use import open_model
from surefoot.use.evaluation import auxiliary_columns, held_out, measure
from surefoot.use.run_evaluation import adopt

FOUND, ASKED = "reference log-probabilities: loaded from the cache", "examples in"


def project(folder, **sections):
    data = {"datasets": ["pairs"], "cache_dir": str(folder / "cache"), **sections.pop("data", {})}
    return Project(folder, **{"stage": "dpo", "method": "lora", **sections}, data=data)


def said(caplog):
    """What was said of the reference, and no more of it."""
    found = [
        r.getMessage()
        for r in caplog.records
        if r.getMessage().startswith("reference log-probabilities: ")
    ]
    caplog.clear()
    return ["found" if text == FOUND else "asked" for text in found]


def kept(folder):
    return sorted((folder / "cache" / "reference").rglob("*.safetensors"))


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control):
        control.should_training_stop |= state.global_step == 5


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.proof), "lora"])
def test_a_resume_finds_what_was_asked_and_where_it_is_gone_asks_again(method, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    saves = {"save_steps": 8}  # and when it is stopped
    made = project(tmp_path, method=method, train={"max_steps": 8}, checkpoint=saves)
    surefoot.train(made.recipe)
    assert said(caplog) == ["asked"]
    for name in ("found", "asked"):
        options = {"train.output_dir": str(tmp_path / name)}
        surefoot.train(made.recipe, callbacks=[Stop()], **options)
        assert said(caplog) == ["found"]  # another run of the same data and model
        if name == "asked":
            for file in kept(tmp_path):
                file.unlink()
        surefoot.train(made.recipe, **options)
        assert said(caplog) == [name]
        assert losses(tmp_path / name) == losses(made.run)
        assert_same(final_weights(tmp_path / name), final_weights(made.run))


def test_another_stage_setting_asks_nobody_and_another_model_is_asked(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    made = project(tmp_path, train={"max_steps": 1})

    def run(**changes):
        build(load(made.recipe, changes))
        return said(caplog)

    assert run() == ["asked"]
    assert run(**{"stage.dpo.beta": 0.3}) == ["found"]
    assert run(**{"stage.dpo.loss_type": "ipo", "data.val_size": 4}) == ["found"]
    assert run(**{"stage.dpo.loss_type": "orpo"}) == []
    assert run(**{"train.precision": "bf16"}) == ["asked"]
    weights = tmp_path / "model" / "model.safetensors"
    os.utime(weights)
    assert run() == ["found"]
    flip(weights, -3)  # with its length, and then with its times
    os.utime(weights, (1e9, 1e9))
    assert run() == ["asked"]


def test_a_run_killed_while_it_asks_begins_again_where_it_was(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("surefoot.training.precompute.PIECE", 4)  # of 24 examples
    made = project(tmp_path, train={"max_steps": 2})
    whole = tmp_path / "whole"
    surefoot.train(made.recipe, **{"train.output_dir": str(whole)})
    expected = {file.name: file.read_bytes() for file in kept(tmp_path)}
    assert len(expected) == 6
    for file in kept(tmp_path):
        file.unlink()
    killed = in_child(
        lambda: surefoot.train(made.recipe), kill_when=lambda: len(kept(tmp_path)) > 2
    )
    assert killed
    before = {file.name: file.stat().st_mtime_ns for file in kept(tmp_path)}
    surefoot.train(made.recipe)
    assert {file.name: file.read_bytes() for file in kept(tmp_path)} == expected
    after = {file.name: file.stat().st_mtime_ns for file in kept(tmp_path)}
    assert before.items() <= after.items()
    assert losses(made.run) == losses(whole)


def test_it_begins_with_ln_2_and_learns_to_tell_right_from_wrong(tmp_path):
    made = project(
        tmp_path,
        method="full",
        data={"eval_datasets": ["pairs"]},
        train={"max_steps": 15, "eval_steps": 15},
        optim={"adamw": {"learning_rate": 0.005}},
        checkpoint={"save_steps": 15},
    )
    surefoot.train(made.recipe)
    first, *_, last = metrics(made.run)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["eval_rewards/accuracies"] == 1
    assert last["eval_rewards/margins"] > 0.5
    assert last["eval_loss"] < 0.5
    assert "eval_perplexity" not in last
    assert "eval_token_accuracy" not in last


def test_another_model_may_be_the_reference(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    before = project(tmp_path / "before", method="full", train={"max_steps": 4})
    surefoot.train(before.recipe)  # the reference: weights and tokenizer of its checkpoint
    other = str(before.run / "checkpoint-4")
    caplog.clear()
    made = project(tmp_path / "made", train={"max_steps": 4}, data={"val_size": 4})
    options = {"stage.dpo.reference": other, "train.eval_steps": 4}
    surefoot.train(made.recipe, **options)
    assert said(caplog) == ["asked"]
    first, *_, logged = metrics(made.run)
    ahead = metrics(before.run)[-1]["rewards/margins"]
    assert first["rewards/margins"] == pytest.approx(-ahead, rel=0.5)  # so much it is behind
    recipe = load(made.recipe, options)
    own = RunParts.to_measure(recipe)
    start, end = (adopt(open_model(path), recipe) for path in (other, made.run / "checkpoint-4"))
    (source,) = held_out(own)
    says = auxiliary_columns(own)[source.name]
    same = measure(*start, source.examples, columns=says)
    assert same["rewards/margins"] == pytest.approx(0, abs=1e-5)
    found = measure(*end, source.examples, columns=says)
    assert found["rewards/margins"] == pytest.approx(logged["eval_rewards/margins"], abs=1e-5)


def test_a_reference_with_other_tokens_is_refused(tmp_path):
    made = project(tmp_path)
    other = model_folder(tmp_path / "other")
    load_tokenizer(other, new_special_tokens=["<other>"]).save_pretrained(other)
    with pytest.raises(RecipeError, match="has a different tokenizer from"):
        surefoot.train(made.recipe, **{"stage.dpo.reference": str(other)})


def test_packed_and_padded_learn_the_same(tmp_path):
    steps = {"train": {"max_steps": 4}, "checkpoint": {"save_steps": 4}}
    made, found = project(tmp_path, method="full", **steps), []
    for packing in (True, False):
        run = tmp_path / f"packing {packing}"
        surefoot.train(made.recipe, **{"data.packing": packing, "train.output_dir": str(run)})
        found.append([r["rewards/margins"] for r in metrics(run)])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_run_shares_prompts_from_its_start_and_as_it_goes_on(tmp_path):
    made = project(tmp_path, method="full", train={"max_steps": 2})
    begun = build(load(made.recipe))
    surefoot.train(made.recipe)
    for one in (begun, build(load(made.recipe), resume=checkpoints(made.run)[-1])):
        (batch, *_) = one.windows.loader.window_at(0, 0)
        assert batch.branches is not None
        assert one.state.kernels.shared_prompts


def test_a_dataset_of_the_other_kind_is_an_error_that_says_what_to_do(tmp_path):
    made = project(tmp_path)
    with pytest.raises(DataError, match=r'none of its 24 rows .*"ranking": true in dataset_info'):
        surefoot.train(made.recipe, **{"data.datasets": ["sums"]})
    with pytest.raises(DataError, match=r"none of its 24 rows .*a ranking row"):
        surefoot.train(made.recipe, stage="sft")


@pytest.mark.parametrize(
    ("setting", "words"),
    [("data.train_on_prompt", "has no effect"), ("data.streaming", "orpo or simpo")],
)
def test_a_setting_that_a_pair_has_no_use_for_is_refused(setting, words, tmp_path):
    made = project(tmp_path)
    with pytest.raises(RecipeError, match=f"{setting}: .*{words}"):
        load(made.recipe, {setting: True})


# ---- several processes


def pairs(count=11, seed=3):
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = random.integers(3, 64, random.integers(1, 6)).tolist()
        answers = [random.integers(3, 64, random.integers(1, 6)).tolist() for _ in range(2)]
        both = [
            {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}
            for answer in answers
        ]
        found.append(join(*both))
    return in_memory(found)


def kept_in(folder):
    """What is kept, by file."""
    return [load_file(file)["reference.values"] for file in sorted(folder.rglob("*.safetensors"))]


def asked(world, folder, **changes):
    """What the model says of each example, and the losses of a few steps that follow."""
    changes = {"stage": DPO(beta=0.5), "packing": True, "dtype": torch.float64, **changes}
    own = folder / f"asked-{world.size}"
    made = trainer(world, own, examples=pairs(), **changes)
    if world.is_main:
        (values,) = kept_in(own / "cache")
        assert values.dtype == np.float32
    learnt = [item["reference"].tolist() for item in made.windows.loader.order.examples]
    return learnt, learn(made, 2)


def learn(made, count):
    """Loss, weight and the reward's margin of each of the next steps."""
    found = []
    for step in range(count):
        made.policy.module.train()
        figures = made.policy.step.gradients(
            made.windows.loader.next_window(),
            partial(made.stage.loss, "policy"),
            step=step,
            before=lambda index: None,
            after=lambda index: None,
        )
        made.policy.step.update(figures)
        made.policy.step.optimizer.zero_grad(set_to_none=True)
        read = figures.read()
        found.append((read.loss, read.weight, read.grad_norm, *read.metrics.values()))
    return found


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        pytest.param({}, {}, marks=pytest.mark.proof),
        pytest.param({"dp_replicate": 2}, {"method": LoRA(rank=2)}, marks=pytest.mark.proof),
        ({"tp": 2}, {}),
        pytest.param({"pp": 2}, {}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_two_processes_ask_and_learn_what_one_does(parallel, changes, tmp_path):
    expected = asked(ALONE, tmp_path, **changes)
    found = ranks.run(2, lambda w: asked(w, tmp_path, parallel=parallel, **changes), **parallel)
    assert found[0] == found[1]
    assert np.asarray(found[0][0]) == pytest.approx(np.asarray(expected[0]), rel=1e-6)
    assert np.asarray(found[0][1]) == pytest.approx(np.asarray(expected[1]), rel=1e-6, abs=1e-6)
    one, two = (kept_in(tmp_path / f"asked-{count}" / "cache") for count in (1, 2))
    assert np.concatenate(one) == pytest.approx(np.concatenate(two), rel=1e-6)


@dataclass(frozen=True)
class Says:
    """A context that knows one number."""

    value: float

    def reduce(self, role, examples, function):
        return np.full((len(examples), 2, 2), self.value)


def open_pairs(folder, items):
    one = eval_set(items, 4)
    return precomputation(DPO(), "model", folder, [one], ALONE)


def test_a_reference_that_says_nan_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="NaN or infinite"):
        open_pairs(tmp_path, pairs()).run(Says(math.nan))
    assert not open_pairs(tmp_path, pairs()).is_complete


def test_what_is_kept_is_found_where_it_is_sound(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.training.precompute.PIECE", 4)
    items = pairs()
    open_pairs(tmp_path, items).run(Says(0.5))
    found = open_pairs(tmp_path, items)
    assert found.is_complete
    (store,) = with_items(items, found).stores
    assert [item["reference"].tolist() for item in store] == [[0.5, 0.5]] * 11
    assert not open_pairs(tmp_path, pairs(seed=4)).is_complete
    first, second, _ = sorted(tmp_path.rglob("*.safetensors"))
    flip(first)
    second.write_bytes(b"")
    assert [known is None for known in open_pairs(tmp_path, items).columns] == [True, True, False]


@pytest.mark.proof
@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.proof), "full"])
def test_a_reference_in_the_window_computes_what_one_before_the_first_step_does(method, tmp_path):
    """With an adapter it is the base, and there is no second model."""
    data = {"datasets": ["marked"], "cache_dir": str(tmp_path / "cache"), "val_size": 4}
    steps = {"max_steps": 4, "eval_steps": 4}
    made = Project(tmp_path, stage={"kto": {}}, method=method, data=data, train=steps)
    surefoot.train(made.recipe)
    before, window = kept(tmp_path), {"train.output_dir": str(tmp_path / "window")}
    surefoot.train(made.recipe, **window, **{"stage.kto.precompute_reference": False})
    assert kept(tmp_path) == before
    names = ("loss", "kl", "rewards/margins", "eval_loss", "eval_kl")
    pairs = zip(metrics(made.run), metrics(tmp_path / "window"), strict=True)
    for ahead, inside in pairs:
        assert [inside.get(n) for n in names] == [
            ahead.get(n) if ahead.get(n) is None else pytest.approx(ahead[n], abs=1e-5)
            for n in names
        ]
