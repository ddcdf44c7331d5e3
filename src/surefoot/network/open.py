"""The one way to make a model ready: for training, ``plan``, chat, evaluation and conversions."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..checkpoint.layouts.detection import detect_layout
from ..checkpoint.layouts.opening import open_named
from ..errors import (
    RecipeError,
    counted,
)
from ..log import fell_back
from ..model.expansion import note_new_tokens, refuse_divided, untrained_matrices, verify_new_layers
from ..model.isolation import use_packed
from ..model.layers import (
    add_embedding_noise,
    compile_layers,
    recompute_activations,
    use_float8,
)
from ..model.loading import grow_embeddings, new_rows, upcast_trained
from ..model.lora_layers import enable_float32_lengths, enable_fused_lora, forms_experts
from ..model.numerics import limit_threads
from ..model.outputs import logprob_head_of
from ..model.packed_attention import follow_calls, switch_to_packed
from ..model.packed_mixers import follow_recomputation
from ..model.rms_norm import fuse_norms
from ..model.routers import RouterBiases, check_router_loss, refuse_stages
from ..model.section import ModelSection
from ..model.token_tiles import tile_tokens
from ..model.unloaded_tensors import unloaded
from ..model.weight_matrices import refuse_read_weights
from ..parallel.sharded_model import layers
from ..parallel.world import World
from ._adapters import set_initial_values
from ._file_checks import checked_files
from ._parameter_names import name_parameters
from .draft import REAL, Draft, NetworkOptions, Tensors, check_quantization, read_heads
from .heads import add_heads, refuse_headless, refuse_heads
from .network import Network
from .runner import Engine, ModelForward, PipelineEngine, WholeEngine

logger = logging.getLogger(__name__)


def balance_experts(draft: Draft, _: Tensors) -> None:
    """Count the tokens of each expert, if the recipe updates biases by them. Raises ``RecipeError``
    if the method would not save these."""
    rate, options = draft.section.router_bias_update_rate, draft.options
    if rate is None or not options.is_trainable or options.method is None:
        return
    if draft.module is not draft.inner:
        raise RecipeError(
            "model.router_bias_update_rate: an adapter has no place for the biases of its base; "
            "use method: full or freeze, or remove it"
        )
    if draft.world.pp > 1:
        refuse_stages(draft.inner, rate)
    draft.biases = RouterBiases(draft.inner, rate)


def initialize_adapter(draft: Draft, tensors: Tensors) -> None:
    """Give an adapter values that follow from the weights, unless a checkpoint has its values."""
    if tensors.have_values and draft.options.is_new:
        set_initial_values(draft)


def fuse_lora(draft: Draft, _: Tensors) -> None:
    """Compute each linear map that has an adapter in one autograd function."""
    is_run = draft.options.method is not None or draft.world.tp > 1  # which cuts modules alone
    if draft.module is not draft.inner and is_run:
        enable_fused_lora(draft.module)
    if draft.module is not draft.inner:
        enable_float32_lengths(draft.module)
        if draft.options.is_trainable and forms_experts(draft.module):
            what = "the experts of a layer are formed with their updates, all in one matrix"
            cost = "takes their memory once more in each layer, until its backward pass; name "
            cost += "method.lora.targets without them, or set model.gradient_checkpointing"
            fell_back(what, "PEFT adds the update of a parameter to its values", cost, logging.INFO)


def fuse_rms_norms(draft: Draft, _: Tensors) -> None:
    """Compute each RMSNorm in one autograd function."""
    if draft.options.is_trainable:
        fuse_norms(draft.inner)


def recompute(draft: Draft, tensors: Tensors) -> None:
    """Recompute activations in the backward pass, those of token-wise modules in tiles. Raises
    ``RecipeError`` if the policy does not go with the method."""
    if not draft.options.is_trainable:
        return
    policy = draft.section.recomputes
    if policy == "selective" and draft.module is not draft.inner:
        raise RecipeError(
            "model.gradient_checkpointing: selective would keep products to which an adapter adds "
            "its own in place; set it to full, or to none"
        )
    recompute_activations(draft.inner, policy, keep_random=tensors.have_values)
    if draft.options.packing and policy != "none":
        follow_recomputation(draft.inner)
    divides_matrices = draft.options.parallel.tp > 1
    if policy in ("full", "offload") and not draft.section.compile and not divides_matrices:
        tile_tokens(draft.inner)


def compute_in_float8(draft: Draft, tensors: Tensors) -> None:
    """Multiply what the method trains in float8, in a frozen copy as in the trained model."""
    if draft.section.float8 is not None and draft.options.method is not None:
        emulate = tensors.emulates_float8
        count = use_float8(layers(draft.module), draft.section.float8, emulate=emulate)
        logger.info("float8: %s", counted(count, "linear layer"))


def compile_forward(draft: Draft, tensors: Tensors) -> None:
    """Compile each layer's forward pass."""
    if draft.section.compile and tensors.have_values:
        compile_layers(layers(draft.module))


def verify_added_layers(network: Network) -> None:
    """Prove that layers which the method has added change nothing yet. A collective call. Raises
    ``RecipeError``."""
    with network.evaluating():
        is_packed, agreed = network.options.packing, network.world.first_of
        verify_new_layers(network.inner, network.logps, is_packed=is_packed, agreed=agreed)


Step = Callable[[Draft, Tensors], None]


def open_network(
    base: Path,
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase | None,
    world: World,
    options: NetworkOptions,
    tensors: Tensors = REAL,
) -> Network:
    """The model in ``base``, ready to compute outputs, and to be trained if the options say so. All
    ranks of ``world``, which share it, call it together. The embeddings get rows for tokens that
    only ``tokenizer`` has; None: they are left alone.

    Raises ``ModelError`` if it is not a causal language model, has damaged files, or mixes packed
    documents, ``DamagedFileError`` if a file is not the one in a folder's manifest, ``RecipeError``
    if the method, the heads or the mesh do not fit it.
    """
    draft = Draft(base, section, tokenizer, world, options)
    if not tensors.have_values:
        return finish(draft, STEPS, tensors)
    limit_threads()
    with checked_files(draft):
        return finish(draft, STEPS, tensors)


def finish(draft: Draft, steps: Sequence[Step], tensors: Tensors = REAL) -> Network:
    """The network of a draft that still needs ``steps``."""
    for step in steps:
        step(draft, tensors)
    options = draft.options
    parameters = draft.module.named_parameters()
    weights = draft.weights.sharded(draft.cuts)
    network = Network(
        module=draft.module,
        inner=draft.inner,
        weights=weights if draft.staging is None else draft.staging.weights(weights),
        named={draft.names[name]: p for name, p in parameters if p.requires_grad},
        trainable=draft.trainable,
        blocks=draft.blocks,
        layouts=draft.layouts,
        num_parameters=draft.num_parameters,
        num_trainable=draft.num_trainable,
        coverage=draft.coverage,
        engine=_engine(draft, tensors.runner(draft)),
        world=draft.world,
        options=options,
        cuts=draft.cuts,
        heads=draft.heads,
        sharing=draft.sharing,
        biases=draft.biases,
        awaits_values=draft.values is not None and not options.is_read,
    )
    if options.packing and draft.values is not None and options.is_read:
        network.verify_packing()  # of a whole model that was done when it was loaded
    if tensors.have_values and options.is_read and options.is_trainable:
        verify_added_layers(network)
    return network


def _engine(draft: Draft, runner: ModelForward) -> Engine:
    """A pipeline, if ranks have different layers."""
    options, staging = draft.options, draft.staging
    if staging is None:
        return WholeEngine(
            runner, options.parallel, options.only_generates, draft.world, draft.biases
        )
    pipeline = staging.pipeline(options.parallel, options.precision, draft.cuts)
    return PipelineEngine(staging, pipeline, runner)


def load(draft: Draft, tensors: Tensors) -> None:
    """Load the model."""
    check_quantization(draft)
    refuse_headless(draft.base, draft.options.heads)
    tensors.load(draft)
    if tensors.have_values and draft.options.is_trainable and draft.world.is_main:
        _name_unloaded(draft)
    config = draft.inner.config
    is_eager = draft.section.attention == "auto" and config._attn_implementation == "eager"
    if is_eager and getattr(config.get_text_config(), "num_attention_heads", None):
        what, why = "model.attention: eager", f"{type(draft.inner).__name__} has no sdpa"
        fell_back(what, why, "takes memory by the square of a row's length", logging.INFO)
    check_router_loss(draft.inner, draft.section)


def _name_unloaded(draft: Draft) -> None:
    """Log the tensors of the base that are not in the model."""
    if detect_layout(draft.base) is None:
        return  # its weights come from elsewhere
    source = open_named(draft.base, reading=draft.section.reading)
    shapes, dtypes = source.shapes(), source.dtypes()
    if names := unloaded(draft.inner, shapes):
        size = sum(prod(shapes[name]) * dtypes[name].itemsize for name in names)
        logger.info(
            "not in the model: %s of the base (%s, %.1f MB), such as layers for multi-token "
            "prediction; training leaves them as they are, and exports keep them",
            counted(len(names), "tensor"),
            ", ".join(sorted({re.sub(r"(\.\d+|mtp)\..*", r"\1.*", name) for name in names})[:3]),
            size / 1e6,
        )


def resize_embeddings(draft: Draft, _: Tensors) -> None:
    """Add rows for tokens that the tokenizer has and the model has not."""
    if draft.tokenizer is None:
        return
    draft.has_grown = grow_embeddings(draft.inner, draft.tokenizer)
    special_ids = draft.tokenizer.convert_tokens_to_ids(list(draft.section.new_special_tokens))
    note_new_tokens(draft.inner, [*special_ids, *new_rows(draft.inner)])


def switch_attention(draft: Draft, tensors: Tensors) -> None:
    """Attend within documents, if rows are packed; proven at once, if the values are there."""
    options = draft.options
    if options.packing and tensors.have_values and draft.start is None:
        draft.sharing.is_proven = use_packed(draft.inner, options.longest, options.probes)
    elif options.packing:
        switch_to_packed(draft.inner)
    if options.packing and tensors.have_values:
        follow_calls(draft.inner)  # a callback may generate


def apply_method(draft: Draft, tensors: Tensors) -> None:
    """Freeze what is not trained, or add an adapter."""
    with warnings.catch_warnings():  # of PEFT's, about a property that transformers renamed
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        tensors.adapt(draft)
    refuse_divided(draft.module, tp=draft.world.tp, pp=draft.world.pp)
    if not draft.options.is_trainable:
        return
    if left := untrained_matrices(draft.inner, has_grown=draft.has_grown):
        cure = (
            "model.adapter trains the rows that it has: leave further tokens out, or merge it "
            "first with `surefoot export`"
            if draft.section.adapter is not None
            else "set method.lora.new_tokens: true without modules_to_save, or name embed_tokens "
            "and lm_head in method.lora.modules_to_save or method.freeze.extra_modules, or use "
            "method: full"
        )
        raise RecipeError(
            f"{_new_tokens(draft)}: the rows of new tokens in {' and '.join(left)} would never be "
            f"trained; {cure}"
        )


def _new_tokens(draft: Draft) -> str:
    """Where tokens come from that the model has no embeddings for."""
    if draft.section.new_special_tokens:
        return "model.new_special_tokens"
    return f"the tokenizer in {draft.section.path} has more tokens than the model has embeddings"


def attach_heads(draft: Draft, tensors: Tensors) -> None:
    """Add the heads that compute other outputs than log-probabilities."""
    if draft.options.heads:
        refuse_heads(draft.world)
        draft.heads = add_heads(draft.inner, draft.options.heads)
        if tensors.have_values:
            read_heads(draft)


def freeze(draft: Draft, _: Tensors) -> None:
    """Leave nothing trainable in a network that only computes outputs."""
    if not draft.options.is_trainable:
        draft.module.requires_grad_(False)


def upcast(draft: Draft, _: Tensors) -> None:
    """Hold weights that the method trains in float32, in a frozen copy as in the trained model."""
    if draft.options.method is not None:
        upcast_trained(draft.module, draft.section)


def fuse_head(draft: Draft, _: Tensors) -> None:
    """Find out whether the output head can return log-probabilities."""
    draft.head = logprob_head_of(draft.inner)


def add_noise(draft: Draft, _: Tensors) -> None:
    """Add noise to the embeddings of tokens in training."""
    if (alpha := draft.section.neftune_noise_alpha) is not None and draft.options.is_trainable:
        add_embedding_noise(draft.module, draft.inner, alpha)


def divide_layers(draft: Draft, tensors: Tensors) -> None:
    """Keep this rank's stages of a pipeline."""
    tensors.divide(draft)


def shard_weights(draft: Draft, tensors: Tensors) -> None:
    """Shard matrices over ``tp``, then all weights over the data axes, and load the shards."""
    if draft.world.tp > 1 and draft.options.is_trainable:
        refuse_read_weights(draft.inner)
    tensors.shard(draft)


ON_THE_MODEL: Sequence[Step] = (
    load,  # first; a quantized base is quantized while its files are read
    resize_embeddings,  # before the method, which may train or copy the embeddings
    switch_attention,  # packing is proven on the plain model: an adapter may draw dropout
    apply_method,  # wraps what is there by now
    balance_experts,  # refuses an adapter
    initialize_adapter,  # from weights that are as they are in files
    attach_heads,  # after the method: PEFT's all-linear would wrap a head, too, and freeze it
    fuse_lora,  # only now are there PEFT's modules
    fuse_rms_norms,  # of the copies that the method trains (modules_to_save), too
    compute_in_float8,  # looks at what is trained, which freeze would hide
    recompute,  # looks at what is trained: nothing before the first such layer is recomputed
    upcast,  # likewise
    freeze,  # a frozen copy is like the model that is trained, but for this
    fuse_head,  # probes the unsharded output head: a sharded one has another forward pass
    add_noise,  # after that forward pass, and on what an adapter of the embeddings returns
)
ON_THE_MESH: Sequence[Step] = (
    name_parameters,  # while shapes and storages are those of the files
    divide_layers,  # before the matrices are sharded, so that only this rank's layers are
    shard_weights,  # tp before FSDP, which shards what tp has left
    compile_forward,  # last: hooks that gather weights stay outside of what is compiled
)
STEPS = (*ON_THE_MODEL, *ON_THE_MESH)
