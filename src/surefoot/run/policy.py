"""The model that a recipe trains, its tokens, and how its packed rows are computed.

How it was made ready is recorded in its state: a resumed model takes another path to the same
values, without files or with other ranks. What decides how it computes beside the values must be
equal on the same kind of machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..batch import Probe, StepRunner
from ..data.text.codec import Codec
from ..data.text.templates import template_mismatch
from ..model import packed_attention, packed_kernels, products
from ..model.isolation import select_prompt_sharing
from ..model.loading import device, resolve, training_dtype
from ..model.numerics import LossScaler, choose, replaced
from ..model.section import ModelSection
from ..model.weight_matrices import is_added
from ..network.draft import NetworkOptions
from ..network.network import Network
from ..network.open import open_network, refuse_early
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import open_codec, tokenizer_folder
from ..training.callback import Kernels, TrainerState
from ..training.precompute import model_of
from ..training.step import Learner, Step
from ..training.trainer import Trainer
from . import _data_loading as data_loading

logger = logging.getLogger(__name__)
Around = Callable[[StepRunner], StepRunner]
COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}  # otherwise as weights are held


def used_here() -> dict[str, str]:
    """What a recipe with default settings uses on this machine; docs/devices.md says why."""
    weights = training_dtype(ModelSection(path=""))
    kernels = [
        *packed_kernels.candidates(device()),
        f"{packed_kernels.BY_DOCUMENT} (one call per document)",
    ]
    return {
        "precision": choose("auto"),
        "weights": "trained: float32; frozen: as stored" if weights == "auto" else str(weights)[6:],
        "packed attention": ", ".join(kernels),
        "products in float32": products.chosen(),
    }


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """Tokenizer and chat template; from here on the tokenizer contains the template in use."""
    codec = open_codec(recipe, base)
    if recipe.stage.uses_template:
        folder = tokenizer_folder(recipe.model, base)
        owner = "model" if folder == base else "adapter"
        if folder != base:
            logger.info("tokenizer and chat template: those beside model.adapter, %s", folder)
        if difference := template_mismatch(codec.template, codec.tokenizer, owner):
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
    is_new: bool = True,
    longest: int = 0,
    probes: Sequence[Probe] = (),
) -> Network:
    """The model that a recipe trains; on the meta device if a checkpoint has all of its weights.
    ``is_new`` is False if a checkpoint has the values of what the method adds. ``longest`` are the
    tokens of the longest document in packed rows, ``probes`` rows with pictures."""
    options = options_of(recipe, is_read=is_read, is_new=is_new, longest=longest)
    options = replace(options, probes=probes)
    network = open_network(base, recipe.model, tokenizer, world, options)
    percent = 100 * network.num_trainable / network.num_parameters
    logger.info("trainable parameters: %s (%.3g %% of all)", f"{network.num_trainable:,}", percent)
    if table := network.coverage_table():
        logger.info("%s", table)
    return network


def options_of(
    recipe: Recipe, *, is_read: bool = True, is_new: bool = True, longest: int = 0
) -> NetworkOptions:
    """The options for the model of a recipe."""
    return NetworkOptions(
        method=recipe.method,
        parallel=recipe.parallel,
        precision=choose(recipe.train.precision),
        packing=recipe.data.packing,
        longest=longest,
        seed=recipe.train.seed,
        heads=recipe.stage.heads,
        is_read=is_read,
        is_new=is_new,
    )


def frozen_options(recipe: Recipe, *, longest: int = 0) -> NetworkOptions:
    """The options for a model beside it, which only computes outputs."""
    options = options_of(recipe, longest=longest)
    return replace(options, method=None, heads=(), is_trainable=False)


def check_early(recipe: Recipe, world: World, codec: Codec) -> None:
    """Raise what is known to be wrong before the data is encoded, which may take hours."""
    if why := replaced(recipe.train.precision):
        logger.warning("%s", why)
    auxiliaries = [other for other in recipe.stage.auxiliary.values() if other.model is not None]
    refuse_early(
        resolve(recipe.model),
        recipe.model,
        options_of(recipe),
        recipe.optim,
        num_processes=world.size,
        output_dir=recipe.train.folder,
        tokenizer=codec.tokenizer,
        others=[model_of(auxiliary, recipe.model) for auxiliary in auxiliaries],
    )


def settle_packing(recipe: Recipe, trainer: Trainer, policy: Network, *, is_resumed: bool) -> None:
    """How packed rows are computed, as in a resumed run: the kernel, which is the preferred one
    that passes its self-check on rank 0, and whether prompts are shared.
    """
    if not recipe.data.packing:
        return
    kernels, inner, world = trainer.state.kernels, policy.inner, trainer.world
    if policy.awaits_values:
        policy.verify_packing()  # it has values only now
    # By an order that is written down, never by timing: kernels add up in different orders, so two
    # launches of one recipe differed with what else the machine did (docs/decisions/0041).
    is_free = recipe.model.attention == "auto" and world.pp == 1
    if is_free and inner.config._attn_implementation == f"{packed_attention.PREFIX}sdpa":
        kernel = kernels.packed_attention or (packed_kernels.BY_DOCUMENT if is_resumed else None)
        bounds = data_loading.packed_bounds(recipe, trainer.windows.loader)
        if kernel is None and world.is_main:
            dtype = COMPUTED_IN.get(policy.options.precision, inner.dtype)
            row = packed_kernels.row_of(inner, bounds, device(), dtype)
            kernel = packed_kernels.choose(row)
        kernels.packed_attention = packed_kernels.use(inner, world.from_main(kernel))
    sharing = select_prompt_sharing(policy.sharing, inner, kernels.shared_prompts)
    # Examples are dealt among ranks by it: ranks that differ, as on other processors, would train
    # on some twice, and on others never.
    policy.sharing.is_proven = kernels.shared_prompts = all(world.gathered(sharing))


def end_with_responses(policy: Network, codec: Codec) -> None:
    """Let ``generate`` of the model, in a callback or after the run, end where responses do."""
    config = policy.inner.generation_config
    if policy.inner.can_generate() and config is not None:
        config.eos_token_id = list(dict.fromkeys([*policy.own_stops, *codec.stop_token_ids]))
        config.pad_token_id = codec.tokenizer.pad_token_id


def build_learner(
    recipe: Recipe, policy: Network, state: TrainerState, around: Around | None
) -> Learner:
    """The policy with its optimizer."""
    world, trained = policy.world, policy.trained(recipe.optim)
    run_window: StepRunner = partial(policy.forward_backward, spec=recipe.stage.spec)
    step = Step(
        trained.optimizer,
        recipe.optim.schedule_over(state.max_steps, state.reductions),
        around(run_window) if around else run_window,
        recipe.train.max_grad_norm,
        LossScaler(enabled=choose(recipe.train.precision) == "fp16"),
        world.summed,
        world.totals,
        copies=policy.engine.replicas(),
    )
    return Learner(policy, step, trained)


MACHINE = "machine"  # of two kinds of machines, nothing is compared


def compare_prepared(kernels: Kernels, network: Network) -> None:
    """Record how ``network`` was made ready. Logs what differs from the record of a run that is
    resumed on the same kind of machine."""
    now, before = prepared(network), kernels.prepared or {}
    kernels.prepared = now
    if before.get(MACHINE) != now[MACHINE]:
        return
    different = [name for name in now if before.get(name, now[name]) != now[name]]
    if different:
        changes = "; ".join(f"{name}: {before[name]}, now {now[name]}" for name in different)
        logger.warning(
            "the model is not prepared as when this run was saved, so losses may differ: %s",
            changes,
        )


def prepared(network: Network) -> dict[str, str]:
    """What decides how a network computes, by a name for people."""
    world, module = network.world, network.module
    head = network.engine.runner.head
    dtypes = sorted({f"{p.dtype}".removeprefix("torch.") for p in module.parameters()})
    return {
        MACHINE: f"{device().type}, tp {world.tp}, pp {world.pp}, ranks {world.size}",
        "attention kernel": str(network.inner.config._attn_implementation),
        "output head": "logits" if head is None else "log-probabilities in chunks",
        "precision": network.options.precision,
        "products in float32": products.chosen(),
        "dtypes of weights": ", ".join(dtypes),
        "hash of buffers": _hash(dict(_buffers(module))),
    }


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that no checkpoint contains."""
    for prefix, part in module.named_modules():
        for name in sorted(part._non_persistent_buffers_set):
            if is_added(f"{prefix}.{name}"):  # PEFT's copy of the embeddings that it replaces
                continue
            if (values := part._buffers.get(name)) is not None:
                yield f"{prefix}.{name}", values


def _hash(buffers: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name, values in sorted(buffers.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        data = values.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()
