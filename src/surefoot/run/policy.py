"""The model that a recipe trains, its tokens, and how its packed rows are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..batch import StepRunner
from ..data.text.codec import Codec
from ..data.text.templates import template_mismatch
from ..model.attention import packed, selection
from ..model.precision import LossScaler, choose
from ..network.draft import NetworkOptions
from ..network.meta import select_packed_attention, select_prompt_sharing
from ..network.network import Network
from ..network.open import open_network
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import open_codec
from ..training.learner import Learner
from ..training.step import Step
from ..training.trainer import Trainer
from . import data_loading

logger = logging.getLogger(__name__)
Around = Callable[[StepRunner], StepRunner]


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """Tokenizer and chat template; from here on the tokenizer contains the template in use."""
    codec = open_codec(recipe, base)
    if recipe.stage.uses_template:
        if difference := template_mismatch(codec.template, codec.tokenizer):
            logger.warning("%s", difference)
        codec.tokenizer.chat_template = codec.template.source
    return codec


def open_policy(
    recipe: Recipe,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    world: World = ALONE,
    *,
    is_read: bool = True,
) -> Network:
    """The model that a recipe trains; on the meta device if not ``is_read``, because a
    checkpoint has all of its weights.
    """
    options = options_of(recipe, is_read=is_read)
    made = open_network(base, recipe.model, tokenizer, world, options)
    share = made.num_trainable / made.num_parameters
    logger.info("trainable parameters: %s (%.3g %% of all)", f"{made.num_trainable:,}", 100 * share)
    return made


def options_of(recipe: Recipe, *, is_read: bool = True) -> NetworkOptions:
    """The options for the model of a recipe."""
    return NetworkOptions(
        method=recipe.method,
        parallel=recipe.parallel,
        precision=choose(recipe.train.precision),
        packing=recipe.data.packing,
        seed=recipe.train.seed,
        heads=recipe.stage.heads,
        is_read=is_read,
    )


def settle_packing(recipe: Recipe, trainer: Trainer, policy: Network, *, is_resumed: bool) -> None:
    """How packed rows are computed, as in a resumed run: the kernel, and whether prompts are
    shared.
    """
    kernels = trainer.state.kernels
    if can_select_attention(recipe, policy, trainer.world):
        known = kernels.packed_attention or (selection.BY_DOCUMENT if is_resumed else None)
        dtype = policy_dtype(recipe, policy)
        bounds = data_loading.packed_bounds(recipe, trainer.windows.loader)
        chosen = select_packed_attention(policy.inner, bounds, dtype, known, trainer.world)
        kernels.packed_attention = chosen
    if recipe.data.packing and policy.awaits_values:
        policy.verify_packing()  # it has values only now
    if recipe.data.packing:
        known_sharing = kernels.shared_prompts
        kernels.shared_prompts = select_prompt_sharing(policy.sharing, policy.inner, known_sharing)


def can_select_attention(recipe: Recipe, policy: Network, world: World) -> bool:
    """Whether the run selects the kernel of its packed rows."""
    kernel, is_free = policy.inner.config._attn_implementation, recipe.model.attention == "auto"
    return recipe.data.packing and is_free and world.pp == 1 and kernel == f"{packed.PREFIX}sdpa"


def policy_dtype(recipe: Recipe, policy: Network) -> torch.dtype:
    """The dtype of most of the computation."""
    held: torch.dtype = policy.inner.dtype
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": held}
    return types[choose(recipe.train.precision)]


def build_learner(recipe: Recipe, policy: Network, max_steps: int, around: Around) -> Learner:
    """The policy with its optimizer."""
    world, stage = policy.world, recipe.stage
    trained = policy.trained(recipe.optim, recipe.method.trainable)
    step = Step(
        trained.optimizer,
        recipe.optim.schedule_over(max_steps),
        around(partial(policy.forward_backward, spec=stage.spec)),
        recipe.train.max_grad_norm,
        LossScaler(enabled=choose(recipe.train.precision) == "fp16"),
        world.summed,
        world.totals,
        copies=policy.replicas,
    )
    return Learner(policy, stage.spec, step, trained)
