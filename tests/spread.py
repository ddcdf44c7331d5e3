"""A small run put together as recipes are, on any number of ranks, and compared with one alone."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import folders
import ranks
import small
import tiny
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import WriterGroup
from surefoot.checkpoint.saving.preparation import save as write
from surefoot.checkpoint.saving.saver import AsyncSaver
from surefoot.data.section import DataSection
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.codec import Codec
from surefoot.data.training_data import TrainingData
from surefoot.methods import Full
from surefoot.model import isolation
from surefoot.model.layers import recompute_activations
from surefoot.model.loading import device
from surefoot.model.numerics import seed_everything
from surefoot.model.section import ModelSection
from surefoot.network.draft import REAL
from surefoot.network.heads import add_heads
from surefoot.network.open import (
    ON_THE_MESH,
    Draft,
    finish,
    fuse_head,
    fuse_lora,
    fuse_rms_norms,
    open_network,
)
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe
from surefoot.run.assembly import build_trainer
from surefoot.run.contexts import ColumnsAhead
from surefoot.run.models import separate_roles, with_auxiliary
from surefoot.run.parts import RunParts
from surefoot.stages import SFT
from surefoot.training.section import TrainSection

TRAIN = {"max_steps": 8, "global_batch_size": 6, "micro_batch_size": 3}
CLOSE = 1e-5  # of mean losses (about 4) and of gradient norms: float32 sums in another order
UNEVEN = {"vocab_size": 97, "intermediate_size": 130}


def trainer(
    world,
    folder,
    *,
    method=None,
    kind="llama",
    packing=False,
    recompute=False,
    train=None,
    examples=None,
    parallel=None,
    stage=None,
    codec=None,
    optim=None,
    held=None,
    callbacks=(),
    **changes,
):
    """The trainer of a tiny model, which ``held`` examples evaluate; ``changes`` are of its
    configuration."""
    method = method or Full()
    recipe = Recipe(
        model=ModelSection(path="unused"),
        data=DataSection(datasets=("unused",), packing=packing, cache_dir=folder / "cache"),
        method=method,
        stage=stage or SFT(),
        train=TrainSection(**{**TRAIN, "output_dir": folder, **(train or {})}),
        optim=optim or AdamW(learning_rate=5e-3, weight_decay=0.1),
        parallel=ParallelSection(**{"tp": world.tp, **(parallel or {})}),
    )
    inner = tiny.model(kind, **{"num_hidden_layers": 2, **changes}).to(device())
    sharing = isolation.PromptSharing(packing and isolation.use_packed(inner))
    seed_everything(0, 1)
    model = method.apply(inner)
    with torch.no_grad():  # PEFT's B is zero, and A would have no gradient
        for name, parameter in model.named_parameters():
            if any(leaf in name for leaf in ("lora_B", "vera_lambda", "oft_R")):
                parameter.normal_(std=0.1)
    codec = codec or Codec(folders.tokenizer(), None, recipe.data)
    written = replace(recipe, stage=SFT(), method=Full())  # a test's own have no name in a recipe
    parts = RunParts.around(recipe, codec, folder, written=written)
    draft = Draft(folder, recipe.model, None, world, parts.models.policy.options)
    draft.inner, draft.module, draft.sharing = inner, model, sharing
    for step in (fuse_lora, fuse_rms_norms, fuse_head):  # the forward pass of a user's run
        step(draft, REAL)
    if recompute:
        recompute_activations(inner, "full" if recompute is True else recompute)
    draft.heads = add_heads(inner, recipe.stage.heads)
    for head in draft.heads.modules.values():  # which begin at 0
        torch.nn.init.normal_(head.to(inner.dtype).weight, std=0.3)
    network = finish(draft, ON_THE_MESH)
    group = replace(writers(world), from_first=world.from_main)
    saver = AsyncSaver(folder, kind=network.weights.kind, has_lock=True, writers=group, keep=3)
    evals = {"": in_memory(held)} if held else {}
    data = TrainingData(in_memory(examples or small.examples()), evals)

    def opened(roles):
        networks = {}
        for role in roles:
            path = Path(recipe.stage.auxiliary[role].model or folder / "another")
            with world.main_first():
                if not path.exists():
                    save_another(path, kind, changes)
            section, options = ModelSection(path=str(path)), parts.models.auxiliary(role).options
            networks[role] = open_network(path, section, None, world, options)
        return networks

    columns = ColumnsAhead.of(parts, data, world)
    if not columns.is_complete:
        columns.compute(world, opened(columns.roles), network)
    networks = with_auxiliary(parts.models, network, opened(separate_roles(parts.models, network)))
    return build_trainer(parts, networks, columns.joined(), saver, callbacks, nullcontext())


def save_another(path, kind, changes):
    """A teacher: of the student's own distributions, gradients would be rounding, which Adam
    enlarges."""
    made = tiny.model(kind, **{"num_hidden_layers": 2, **changes})
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    made.save_pretrained(path)


def learn(made, count):
    """Mean loss and gradient norm of each of the next ``count`` steps."""
    found = []
    for _ in range(count):
        step = made.state.global_step
        made.policy.module.train()
        made.policy.step.optimizer = made.policy.optimizer_at(step)
        figures = made.policy.step.gradients(
            made.windows.next_turn().window,
            partial(made.stage.loss, "policy"),
            step=step,
            before=lambda index, step=step: seed_everything(0, step, index, made.world.data_rank),
            after=lambda index: None,
        )
        made.policy.step.update(figures)
        figures = figures.read()
        made.policy.step.optimizer.zero_grad(set_to_none=True)
        made.state.global_step += 1
        found.append((figures.loss / figures.weight, figures.grad_norm))
    return found


def compare(count, folder, *, parallel, steps=2, close=CLOSE, **changes):
    """Processes together learn what one does alone, and all say the same."""
    expected = learn(trainer(ALONE, folder, **changes), steps)
    changes["parallel"] = parallel
    found = ranks.run(count, lambda w: learn(trainer(w, folder, **changes), steps), **parallel)
    assert all(one == found[0] for one in found), "all ranks must say the same"
    for step, (ours, theirs) in enumerate(zip(found[0], expected, strict=True)):
        assert ours == pytest.approx(theirs, abs=close, rel=close), f"step {step}"


def save(made, folder, layout="full"):
    """Write what all ranks hold as one checkpoint, now."""
    states = {name: state for name, state in made.states.items() if name != "random"}
    step, group = made.state.global_step, writers(made.world, layout)
    path = write(folder, step, states, kind=made.saver.kind, writers=group)
    made.world.wait()
    return path


def writers(world, layout="full", exchange=None):
    """The ranks of ``world``, which save together."""
    gathered = exchange or world.gathered
    group = WriterGroup(layout, world.rank, world.size, world.axes, gathered)
    return replace(group, of_stages=world.of_stages)


def resume(made, folder):
    """Go on from a checkpoint of any number of ranks."""
    load(folder, {name: state for name, state in made.states.items() if name != "random"})
    return made
