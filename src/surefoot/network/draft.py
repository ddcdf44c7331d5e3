"""A model while it is made ready, what decides how, and where its tensors are meanwhile.

They are in memory, or on the meta device, where they have names, shapes and types alone; ``plan``
brings a third kind, which can be run. A model is made ready by the same steps whatever they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batch import Probe
from ..checkpoint.layouts.opening import open_folder, read_named, scattered
from ..errors import ModelError
from ..log import fell_back
from ..model.adapter_files import add_adapters, attach, attach_empty
from ..model.config import (
    NO_MODEL,
    as_dequantized,
    auto_class,
    check_adapter,
    check_alone,
    dequantization,
    form_of,
    quantization_of,
    read_config,
    refuse_own_weights,
    refuse_uneven_blocks,
    why_no_model,
)
from ..model.isolation import PromptSharing
from ..model.layers import emulates
from ..model.loading import device, load_model, training_dtype
from ..model.numerics import PrecisionName, seed_everything
from ..model.outputs import LogprobHead
from ..model.routers import RouterBiases
from ..model.section import ModelSection
from ..optim.blocks import TrainedBlocks
from ..optim.state_tensor import ParameterKinds
from ..parallel.section import ParallelSection
from ..parallel.sharded_model import shard, shard_for_generation
from ..parallel.sharding import Box, Cuts
from ..parallel.vocab_parallel import cut_vocabulary
from ..parallel.world import World
from ._coverage import CoverageRow
from ._pipelined import PipelinedModel, to_pipeline
from .heads import Heads, stored_heads
from .method import Method, UnshardedWeights
from .runner import ModelForward
from .shard_loading import MetaModel, Reader, ShardLoader, init_on_meta, read_base


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How a model is made ready, beside which model it is."""

    method: Method | None = None  # None: the model as it is, with the adapter its section names
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionName = "fp32"
    packing: bool = False
    longest: int = 0  # tokens of the longest document in packed rows, as far as it is known
    probes: Sequence[Probe] = ()  # documents with more than text, which packed rows may contain
    seed: int = 0  # of the values that the method draws
    # outputs that need a head of their own, see ``HEADS``, and how many numbers each gives
    heads: Mapping[str, int] = field(default_factory=dict)
    is_trainable: bool = True
    is_new: bool = True  # False if a checkpoint has the values of what the method adds
    is_read: bool = True  # False if a checkpoint has all values, and is loaded afterwards
    weights: Path | None = None  # the folder of the weights, if it is not the model's
    only_generates: bool = False  # ranks of ``dp_shard`` and ``tp`` generate together, in step


@dataclass
class Draft:
    """A model while it is made ready, each step of ``STEPS`` in its turn."""

    base: Path
    section: ModelSection
    tokenizer: PreTrainedTokenizerBase | None  # None: the model has all of its tokens
    world: World
    options: NetworkOptions
    inner: PreTrainedModel = field(init=False)  # without its adapter
    module: nn.Module = field(init=False)  # with it
    weights: UnshardedWeights = field(init=False)
    start: MetaModel | None = None  # of a model that is on the meta device at first
    values: ShardLoader | None = None  # to fill it with
    has_grown: bool = False
    sharing: PromptSharing = field(default_factory=PromptSharing)
    heads: Heads = field(default_factory=Heads)
    biases: RouterBiases | None = None  # of routers, if they are updated
    head: LogprobHead | None = None  # the output head, if it can return log-probabilities
    names: Mapping[str, str] = field(default_factory=dict)  # in the model -> in files
    num_parameters: int = 0  # of the unsharded model
    trainable: Sequence[str] = ()  # names in files of all parameters that may be trained
    blocks: TrainedBlocks = field(default_factory=lambda: TrainedBlocks(frozenset()))  # of these
    layouts: ParameterKinds = field(default_factory=dict)  # what each of them is in the model
    num_trainable: int = 0
    coverage: Sequence[CoverageRow] = ()  # of weights by what is trained, if anything is
    staging: PipelinedModel | None = None
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by names in files


Adapt = Callable[[PreTrainedModel], nn.Module]


class Tensors(Protocol):
    """What the steps of ``open_network`` leave to the kind of tensors."""

    @property
    def have_values(self) -> bool:
        """Whether there is anything to compute, and random generators with a state."""

    @property
    def emulates_float8(self) -> bool:
        """Whether the device has no products in float8."""

    def load(self, draft: Draft) -> None:
        """Set ``draft.inner``."""

    def adapt(self, draft: Draft) -> None:
        """Set ``draft.module``: what the method makes of ``draft.inner``."""

    def divide(self, draft: Draft) -> None:
        """Keep the layers of one rank of a pipeline."""

    def shard(self, draft: Draft) -> None:
        """Keep one rank's shards of all weights, and load them."""

    def runner(self, draft: Draft) -> ModelForward:
        """The forward pass of what is there now."""


class RealTensors:
    """In memory, with the values of files. A model that several ranks share, or whose values no
    file is read for, is on the meta device until it is sharded."""

    have_values = True

    @property
    def emulates_float8(self) -> bool:
        """Whether this process's device has none. Raises ``ModelError`` for a GPU without them."""
        return emulates(device())

    def load(self, draft: Draft) -> None:
        """Read the files, or their headers."""
        base, section, options = draft.base, draft.section, draft.options
        dtype = training_dtype(section)
        if draft.world.mesh is not None or not options.is_read:
            draft.start = init_on_meta(base, section, dtype=dtype, weights=options.weights)
        if draft.start is not None:
            draft.inner = draft.start.model
            return
        stored = _read(base, section, options.weights)
        draft.inner = load_model(base, section, dtype=dtype, weights=stored)

    def adapt(self, draft: Draft) -> None:
        """Draw what the method adds, or read it."""
        if draft.options.method is not None:
            seed_everything(draft.options.seed, 1)
        method = method_of(draft, partial(attach, trainable=draft.options.is_trainable))
        if draft.start is None:
            draft.module = method(draft.inner)
            return
        draft.module, draft.values = draft.start.apply(method)
        if not draft.options.is_read:
            # The checkpoint that is loaded afterwards has all values.
            draft.values = ShardLoader({}, {})

    def divide(self, draft: Draft) -> None:
        """Keep this rank's."""
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

    def shard(self, draft: Draft) -> None:
        """Matrices over ``tp``, then what is left over the data axes."""
        # PEFT's generate runs the inner model, past a wrapper that FSDP2 would take
        # for the root (decisions/0035).
        model = draft.inner if draft.options.only_generates else draft.module
        values = None if draft.values is None else draft.values.of(model)
        cuts = _shard(draft)
        if values is not None:
            values.fill(model, cuts, draft.world)
        names_in_module = {p: name for name, p in draft.module.named_parameters()}
        names_in_files = {
            name: draft.names[names_in_module[p]]
            for name, p in model.named_parameters()
            if p in names_in_module
        }
        draft.cuts = {names_in_files[name]: cut for name, cut in cuts.items()}

    def runner(self, draft: Draft) -> ModelForward:
        """On this rank's shards."""
        options, world = draft.options, draft.world
        if draft.head is not None and world.tp > 1:
            what = "the output head computes full logits of its share of the vocabulary"
            cost = "takes more time and memory than in chunks"
            fell_back(what, "parallel.tp shards the head", cost, logging.INFO)
        is_piped = draft.staging is not None
        is_split = options.parallel.sequence_parallel and not is_piped
        if options.only_generates and world.mesh is not None:  # the root of what is sharded
            head = draft.head if draft.heads.modules else None  # else its logits are shared
            return ModelForward(
                draft.inner, options.precision, head=head, values=draft.heads.values
            )
        return ModelForward(
            draft.module,
            options.precision,
            cut_vocabulary(draft.inner, world),
            draft.head if world.tp == 1 else None,
            draft.heads.values,
            world.tp if is_split else 1,
            row_group=world.row_group if options.packing else None,
        )


class MetaTensors:
    """On the meta device: names, shapes and types, made from ``config.json`` alone."""

    have_values = False
    emulates_float8 = False

    def load(self, draft: Draft) -> None:
        """From the configuration."""
        kernel = draft.section.attention
        attention = None if kernel in ("auto", "flash_attention_2") else kernel  # which needs a GPU
        with torch.device("meta"):
            draft.inner = from_config(draft.base, draft.section, attention=attention)

    def adapt(self, draft: Draft) -> None:
        """Nothing is drawn: a meta model has no values."""
        with torch.device("meta"):
            draft.module = method_of(draft, attach_empty)(draft.inner)

    def divide(self, draft: Draft) -> None:
        """It stays whole."""

    def shard(self, draft: Draft) -> None:
        """It stays whole."""

    def runner(self, draft: Draft) -> ModelForward:
        """Never run."""
        return ModelForward(draft.module, draft.options.precision)


REAL = RealTensors()


def check_quantization(draft: Draft) -> None:
    """Raise ``RecipeError`` if several ranks would use a base that is quantized in memory, and
    ``ModelError`` or ``RecipeError`` if quantized files cannot be read, or not be trained."""
    check_alone(draft.section, draft.world.size)
    config, method = read_config(draft.base, draft.section), draft.options.method
    dequantization(config, draft.section, draft.base)
    if method is not None and method.saves_base_model:
        refuse_own_weights(config, draft.base)


def from_config(
    base: Path,
    section: ModelSection,
    *,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
) -> PreTrainedModel:
    """The model that ``config.json`` in ``base`` describes, on torch's default device, of ``dtype``
    or else of its configuration's. Raises ``ModelError`` if it describes none."""
    try:
        config = as_dequantized(read_config(base, section))
        model: PreTrainedModel = auto_class(config).from_config(
            config,
            dtype=dtype or config.dtype or torch.float32,
            attn_implementation=attention,
            trust_remote_code=section.trust_remote_code,
        )
    except NO_MODEL as error:
        raise ModelError(
            f"{base}: cannot build the model from config.json: {why_no_model(error, base)}"
        ) from None
    return model


def read_heads(draft: Draft) -> None:
    """Read heads from the folder that is opened; those that are not there start at 0."""
    # The folder that was trained last comes first.
    candidates = (draft.section.adapter, draft.options.weights, draft.base)
    folders = [folder for folder in candidates if folder is not None]
    stored = stored_heads(draft.heads, folders) if draft.options.is_read else {}
    new, readers = dict[str, nn.Parameter](), dict[str, Reader]()
    for name, p in draft.module.named_parameters():
        if (in_file := draft.heads.name_in_file(name)) is not None:
            new[name] = p
            readers[name] = stored.get(in_file, partial(_zeros, p.dtype))
    if (values := draft.values) is not None:
        draft.values = ShardLoader({**values.readers, **readers}, {**values.tensors, **new})
        return
    for name, p in new.items():
        p.detach().copy_(readers[name](Box.whole(tuple(p.shape))))


def _read(
    base: Path, section: ModelSection, weights: Path | None
) -> Mapping[str, torch.Tensor] | None:
    """The tensors of a model, if transformers cannot read them itself."""
    config = read_config(base, section)
    if form_of(config, base) is not None:
        return read_base(base, section, weights)
    if quantization_of(config) is not None:
        refuse_uneven_blocks(config, open_folder(base).shapes(), base)
    reading = section.reading
    return scattered(base, reading) if weights is None else read_named(weights, base, reading)


def method_of(draft: Draft, attach_from: Callable[[PreTrainedModel, Path], nn.Module]) -> Adapt:
    """What makes the model: the adapter to resume from, the method, or neither."""
    method, folder = draft.options.method, draft.section.adapter
    adapt: Adapt = lambda model: cast(nn.Module, model)  # noqa: E731
    check_adapter(draft.section)
    if folder is not None:
        attach = lambda model: attach_from(model, folder)  # noqa: E731
        adapt = attach if method is None else partial(method.attach, attach=attach)
    elif method is not None:
        adapt = method.apply
    if not draft.section.frozen_adapters:
        return adapt
    # On the meta device there is nothing to read files into.
    is_read = attach_from is not attach_empty
    return lambda model: add_adapters(adapt(model), draft.section.frozen_adapters, is_read=is_read)


def _shard(draft: Draft) -> dict[str, Cuts]:
    if draft.options.only_generates:
        return shard_for_generation(draft.inner, draft.world, draft.options.parallel)
    return shard(
        draft.module,
        draft.inner,
        draft.world,
        draft.options.parallel,
        dtype=torch.bfloat16 if draft.options.precision == "bf16" else None,
        stages=None if draft.staging is None else draft.staging.stretches(),
    )


def _zeros(dtype: torch.dtype, box: Box) -> torch.Tensor:
    return torch.zeros(box.shape, dtype=dtype)
