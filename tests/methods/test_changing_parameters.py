"""A method may train other parameters at other steps: a run resumes inside and between them."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from safetensors.torch import load_file

from project import Project, assert_same, final_weights, losses
from surefoot.errors import CheckpointError
from surefoot.methods import METHODS
from surefoot.methods.full import Full
from surefoot.methods.rules import problems_of_own_weights
from surefoot.model import FullWeights
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from surefoot.training import TrainerCallback

STEPS, INTERVAL = 8, 3  # blocks: steps 1-3, 4-6, 7-8 train layers 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """BAdam's idea (arXiv:2404.02827): one layer at a time, for ``interval`` steps each."""

    saves_base_model: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()

    interval: int = INTERVAL
    """Steps that one layer is trained for."""

    def apply(self, model):
        return model.requires_grad_(True)

    def weights(self, module, inner):
        return FullWeights(inner)

    def trainable(self, step, names):
        of = {name: re.search(r"layers\.(\d+)\.", name) for name in names}
        layers = sorted({int(found[1]) for found in of.values() if found})
        turn = layers[step // self.interval % len(layers)]
        return [name for name, found in of.items() if found and int(found[1]) == turn]

    def problems(self, model):
        return problems_of_own_weights("blocks", model)


class Watch(TrainerCallback):
    """Notes the layers whose parameters the optimizer has at each step, and stops at a step."""

    def __init__(self, last=STEPS):
        self.last, self.layers = last, {}

    def on_optimizer_step(self, args, state, control):
        names = [name for group in args.optimizer.param_groups for name in group["names"]]
        trained = {n for n, p in args.model.named_parameters() if p.requires_grad}
        moved = {n for n, p in args.model.named_parameters() if p.grad is not None}
        assert set(names) == trained == moved
        self.layers[state.global_step + 1] = {int(name.split(".")[2]) for name in names}

    def on_step_end(self, args, state, control):
        control.should_training_stop |= state.global_step == self.last


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "blocks", Blocks)
    project = Project(tmp_path, train={"max_steps": STEPS})
    return replace(load(project.recipe), method=Blocks())


def at(recipe, folder, save_steps):
    return replace(
        recipe,
        train=replace(recipe.train, output_dir=folder),
        checkpoint=replace(recipe.checkpoint, save_steps=save_steps),
    )


@pytest.mark.parametrize("saved", [5, 6])  # inside a block, and on its edge
def test_a_run_that_trains_one_layer_at_a_time_resumes_to_the_same_bits(recipe, tmp_path, saved):
    watch = Watch()
    build(at(recipe, tmp_path / "whole", 100), callbacks=[watch]).fit()
    assert [watch.layers[step] for step in (1, 3, 4, 6, 7, 8)] == [{0}, {0}, {1}, {1}, {2}, {2}]

    cut = at(recipe, tmp_path / "cut", saved)
    build(cut, callbacks=[Watch(last=saved + 1)]).fit()
    moments = load_file(tmp_path / "cut" / f"checkpoint-{saved}" / "optimizer.safetensors")
    assert {name.split(".")[2] for name in moments} == {"1"}  # the block of the last step

    again = Watch()
    folder = tmp_path / "cut" / f"checkpoint-{saved}"
    build(
        replace(cut, train=replace(cut.train, output_dir=tmp_path / "rest")),
        resume=folder,
        callbacks=[again],
    ).fit()
    assert again.layers == {step: watch.layers[step] for step in range(saved + 1, STEPS + 1)}
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "rest") == whole  # the log of the first came with the checkpoint
    assert_same(final_weights(tmp_path / "rest"), final_weights(tmp_path / "whole"))


def test_a_state_of_another_block_than_that_of_the_step_is_refused(recipe, tmp_path):
    build(at(recipe, tmp_path / "cut", 2), callbacks=[Watch(last=2)]).fit()
    other = replace(at(recipe, tmp_path / "rest", 2), method=Full())
    with pytest.raises(CheckpointError, match="other parameters: 0 unknown"):
        build(other, resume=tmp_path / "cut" / "checkpoint-2")
