"""A model while it is made ready, and what decides how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.isolation import PromptSharing
from ..model.numerics import PrecisionName
from ..model.outputs import LogprobHead
from ..model.section import ModelSection
from ..model.trained_weights import CoverageRow
from ..optim.blocks import TrainedBlocks
from ..optim.state_tensor import ParameterKinds
from ..parallel.section import ParallelSection
from ..parallel.sharding import Cuts
from ..parallel.world import World
from .heads import Heads
from .method import Method, UnshardedWeights
from .pipelined import PipelinedModel
from .shard_loading import MetaModel, ShardLoader


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How a model is made ready, beside which model it is."""

    method: Method | None = None  # None: the model as it is, with the adapter its section names
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionName = "fp32"
    packing: bool = False
    longest: int = 0  # tokens of the longest document in packed rows, as far as it is known
    seed: int = 0  # of the values that the method draws
    heads: Sequence[str] = ()  # outputs that need a head of their own, see ``HEADS``
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
