"""One run of each trainer, whole, for the tests to switch in the middle of."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from theirs import HALF, Losses, policy_of, recipe_in, their_trainer, weights_of

from each import some
from surefoot.recipe.recipe import Recipe
from surefoot.run.training_run import build

METHODS = {
    "full": {},
    "freeze": {"method": {"freeze": {"num_layers": 1, "extra_modules": ["norm", "lm_head"]}}},
    "lora": {"method": {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}}},
}


@dataclass(frozen=True)
class Both:
    """What our run and their run of one recipe left: ``STEPS`` steps, a checkpoint half way."""

    recipe: Recipe
    ours: Path
    theirs: Path
    base: Path | None  # of an adapter
    our_weights: dict
    their_weights: dict
    our_losses: dict
    their_losses: dict

    def start(self):
        """A model for their trainer, as their own run began with."""
        return start(self.recipe, self.ours.parent / "start")


def start(recipe, folder):
    """Their model with our first adapter, or with our choice of what learns."""
    policy = build(recipe).policy.module
    if not recipe.method.saves_base_model:
        policy.save_pretrained(folder)
        return policy_of(recipe, folder)
    model = policy_of(recipe)
    learns = {name for name, p in policy.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learns)
    return model


def train_both(folder, method):
    recipe = recipe_in(folder, **METHODS[method])
    recipe = replace(recipe, train=replace(recipe.train, output_dir=folder / "ours"))
    losses = Losses()
    theirs = their_trainer(recipe, folder / "theirs", losses, model=start(recipe, folder / "start"))
    theirs.train()
    ours = build(recipe)
    ours.fit()
    return Both(
        recipe,
        folder / "ours" / f"checkpoint-{HALF}",
        folder / "theirs" / f"checkpoint-{HALF}",
        Path(recipe.model.path) if not recipe.method.saves_base_model else None,
        weights_of(ours.policy.module),
        weights_of(theirs.model),
        {r["step"]: r["loss"] for r in ours.state.log_history},
        losses.of,
    )


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    """The runs of a method by its name, made when they are first asked for."""
    return functools.cache(lambda method: train_both(tmp_path_factory.mktemp(method), method))


@pytest.fixture(params=some(METHODS, ["full", "lora"]))
def both(request, runs):
    return runs(request.param)


@pytest.fixture
def full(runs):
    return runs("full")


@pytest.fixture
def lora(runs):
    return runs("lora")
