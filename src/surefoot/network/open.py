"""The one way to make a model ready: for training, ``plan``, chat, evaluation and conversions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.layouts import scattered
from ..errors import RecipeError
from ..geometry.sharding import Cuts
from ..model.attention import packed
from ..model.fused_lora import enable_fused_lora
from ..model.head.logprob_head import LogprobHead, asked_head
from ..model.precision import PrecisionName
from ..model.pretrained.compiled import compile_layers
from ..model.pretrained.loading import (
    device,
    grow_embeddings,
    load_model,
    recompute_activations,
    training_dtype,
    upcast_trained,
)
from ..model.pretrained.quantized import check_alone, num_elements
from ..model.pretrained.weights import names_in_files
from ..model.section import ModelSection
from ..model.seeding import seed_everything
from ..parallel.section import ParallelSection
from ..parallel.sharded_model import layers, shard
from ..parallel.tensor.vocab_parallel import cut_vocabulary
from ..parallel.world import World
from ..staging import PipelinedModel, to_pipeline
from ..startup import MetaModel, ShardLoader, init_on_meta
from .method import Method, UnshardedWeights
from .network import Network
from .runner import Engine, ModelForward, PipelineEngine, WholeEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """What decides how a model is made ready, beside which model it is."""

    method: Method
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionName = "fp32"
    packing: bool = False
    seed: int = 0  # of what the method draws
    is_read: bool = True  # whether values are read; False if a checkpoint has all of them
    is_trainable: bool = True


@dataclass
class Draft:
    """A model while it is made ready, each step of ``STEPS`` in its turn."""

    base: Path
    section: ModelSection
    tokenizer: PreTrainedTokenizerBase
    world: World
    options: NetworkOptions
    inner: PreTrainedModel = field(init=False)  # without its adapter
    module: nn.Module = field(init=False)  # with it
    weights: UnshardedWeights = field(init=False)
    start: MetaModel | None = None  # of a model that is on the meta device at first
    values: ShardLoader | None = None  # to fill it with
    has_grown: bool = False
    sharing: packed.PromptSharing = field(default_factory=packed.PromptSharing)
    head: LogprobHead | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # in the model -> in files
    trainable: Sequence[str] = ()  # names in files of all parameters that may be trained
    num_parameters: int = 0
    staging: PipelinedModel | None = None
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by names in files


def open_network(
    base: Path,
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    options: NetworkOptions,
) -> Network:
    """The model in ``base``, ready to compute outputs, and to be trained if the options say so. All
    ranks call it together.

    Raises:
        ModelError: not a causal language model, damaged files, or one that mixes packed documents.
        RecipeError: the method or the mesh does not fit the model.
    """
    return finish(Draft(base, section, tokenizer, world, options), STEPS)


def finish(draft: Draft, steps: Sequence[Callable[[Draft], None]]) -> Network:
    """The network of a draft that still needs ``steps``."""
    for step in steps:
        step(draft)
    precision = draft.options.precision
    named = draft.module.named_parameters()
    weights = draft.weights.sharded(draft.cuts)
    network = Network(
        module=draft.module,
        inner=draft.inner,
        weights=weights if draft.staging is None else draft.staging.weights(weights),
        named={draft.names[name]: p for name, p in named if p.requires_grad},
        trainable=draft.trainable,
        num_parameters=draft.num_parameters,
        engine=_engine(draft, precision),
        world=draft.world,
        cuts=draft.cuts,
        sharing=draft.sharing,
        awaits_values=draft.values is not None and not draft.options.is_read,
    )
    if draft.options.packing and draft.values is not None and draft.options.is_read:
        network.verify_packing()  # of a whole model that was done when it was loaded
    return network


def _engine(draft: Draft, precision: PrecisionName) -> Engine:
    world, parallel, staging = draft.world, draft.options.parallel, draft.staging
    runner = ModelForward(
        draft.module,
        precision,
        cut_vocabulary(draft.inner, world),
        draft.head if world.tp == 1 else None,
        world.tp if parallel.sequence_parallel and staging is None else 1,
    )
    if staging is None:
        return WholeEngine(runner, device())
    return PipelineEngine(staging, staging.pipeline(parallel, precision, draft.cuts), runner)


def load(draft: Draft) -> None:
    """Load the model, or create it on the meta device if ranks share it or no value is read."""
    check_alone(draft.section, draft.world.size)
    dtype = training_dtype(draft.section)
    if draft.world.mesh is not None or not draft.options.is_read:
        draft.start = init_on_meta(draft.base, draft.section, dtype=dtype)
    if draft.start is not None:
        draft.inner = draft.start.model
    else:
        stored = scattered(draft.base)
        draft.inner = load_model(draft.base, draft.section, dtype=dtype, weights=stored)


def resize_embeddings(draft: Draft) -> None:
    """Add rows for tokens that the tokenizer has and the model has not."""
    draft.has_grown = grow_embeddings(draft.inner, draft.tokenizer)


def switch_attention(draft: Draft) -> None:
    """Attend within documents, if rows are packed; proven now if the values are there."""
    if draft.options.packing and draft.start is None:
        draft.sharing.is_proven = packed.use_packed(draft.inner)
    elif draft.options.packing:
        packed.switch_to_packed(draft.inner)


def apply_method(draft: Draft) -> None:
    """Freeze what is not trained, or add an adapter."""
    seed_everything(draft.options.seed, 1)
    method = draft.options.method
    if draft.start is None:
        draft.module = method.apply(draft.inner)
        return
    draft.module, draft.values = draft.start.apply(method.apply)
    if not draft.options.is_read:
        draft.values = ShardLoader({}, {})


def fuse_lora(draft: Draft) -> None:
    """Compute each adapted linear map in one autograd function."""
    if draft.module is not draft.inner:
        enable_fused_lora(draft.module)


def freeze(draft: Draft) -> None:
    """Leave nothing trainable in a network that only computes outputs."""
    if not draft.options.is_trainable:
        draft.module.requires_grad_(False)


def recompute(draft: Draft) -> None:
    """Recompute activations in the backward pass."""
    if draft.section.gradient_checkpointing:
        recompute_activations(draft.inner)


def upcast(draft: Draft) -> None:
    """Hold trained weights in float32."""
    if draft.has_grown and draft.options.is_trainable:
        _refuse_frozen_new_tokens(draft.module)
    upcast_trained(draft.module, draft.section)
    learning = sum(p.numel() for p in draft.module.parameters() if p.requires_grad)
    share = learning / sum(num_elements(p) for p in draft.module.parameters())
    logger.info("%s parameters learn, %.3g %% of all", f"{learning:,}", 100 * share)


def fuse_head(draft: Draft) -> None:
    """Find out whether the output head can return log-probabilities."""
    draft.head = asked_head(draft.inner)


def name_parameters(draft: Draft) -> None:
    """Note each parameter's name in files."""
    draft.weights = draft.options.method.weights(draft.module, draft.inner)
    draft.names = names_in_files(draft.module, draft.weights)
    named = draft.module.named_parameters()
    draft.trainable = [draft.names[name] for name, p in named if p.requires_grad]
    draft.num_parameters = sum(num_elements(p) for p in draft.module.parameters())


def divide_layers(draft: Draft) -> None:
    """Keep this rank's stages of a pipeline."""
    draft.staging = to_pipeline(
        draft.module,
        draft.inner,
        draft.weights,
        draft.names,
        draft.world,
        draft.options.parallel,
    )
    if draft.staging is not None:
        draft.names = dict(draft.staging.names)
    if draft.values is not None:
        draft.values = draft.values.of(draft.module)


def shard_weights(draft: Draft) -> None:
    """Shard matrices over ``tp``, then all weights over the data axes, and load the shards."""
    found = shard(
        draft.module,
        draft.inner,
        draft.world,
        draft.options.parallel,
        dtype=torch.bfloat16 if draft.options.precision == "bf16" else None,
        stages=None if draft.staging is None else draft.staging.stretches(),
    )
    if draft.values is not None:
        draft.values.fill(draft.module, found, draft.world)
    draft.cuts = {draft.names[name]: cut for name, cut in found.items()}


def compile_forward(draft: Draft) -> None:
    """Compile each layer's forward pass."""
    if draft.section.compile:
        compile_layers(layers(draft.module))


ON_THE_MODEL = (
    load,  # first; a quantized base is quantized while its files are read
    resize_embeddings,  # before the method, which may train or copy the embeddings
    switch_attention,  # proves isolation on the plain model: an adapter may draw dropout
    apply_method,  # wraps what is there by now
    fuse_lora,  # only once PEFT's modules exist
    freeze,  # before it matters what is trained
    recompute,  # looks at what is trained: before the first such layer nothing is recomputed
    upcast,  # likewise
    fuse_head,  # probes the unsharded head: a sharded one has another forward pass
)
ON_THE_MESH = (
    name_parameters,  # while shapes and storages are those of the files
    divide_layers,  # before tp, so that only this rank's layers are sharded
    shard_weights,  # tp before FSDP, which shards what tp has left
    compile_forward,  # last: hooks that gather weights stay outside of what is compiled
)
STEPS = (*ON_THE_MODEL, *ON_THE_MESH)


def _refuse_frozen_new_tokens(policy: nn.Module) -> None:
    embeddings: nn.Module = policy.get_input_embeddings()  # type: ignore[operator]
    if not any(p.requires_grad for p in embeddings.parameters()):
        raise RecipeError(
            "model.new_special_tokens: the embeddings of the new tokens would never learn; "
            "name them in method.lora.modules_to_save (embed_tokens, lm_head) or in "
            "method.freeze.extra_modules, or use method: full"
        )
