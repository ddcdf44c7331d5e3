"""The ``Stage`` protocol: which outputs a stage needs of which models, what it prepares, and its
loss.

Everything before the loss is about the examples of the *global* window: a stage knows no rank, no
micro-batch and no device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from ..batch import Batch, Classes, Features, Loss, Outputs, OutputSpec, without_labels
from ..data.example import Encoded, Example
from ..data.section import DataSection
from ..data.text.collation import collate as packed_or_padded
from ..generate.section import GenerateSection
from ..generate.servers import Engine, Sampler
from ..parallel.section import ParallelSection
from ..schema import Problem
from ..schema.locations import FunctionPath
from .rewards import AuxiliaryModel as AuxiliaryModel  # noqa: PLC0414 - where stages find it

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..data.example import Message
    from ..data.store.dataset import EncodedDataset
    from ..data.text.codec import Codec
    from ..generate.generation import Sample
    from .rewards import Reward, Rewarded, RewardProcess
    from .rollout import Event, Rollout

Reduction: TypeAlias = "Callable[[Outputs, Batch], torch.Tensor]"  # a row per example
Prompts = Sequence[Sequence[int]]  # token ids
Rewards: TypeAlias = "Mapping[str, Reward]"  # by names in metrics
Rollouts: TypeAlias = "Sequence[Rollout]"
Events: TypeAlias = "Sequence[Event]"
Replies: TypeAlias = "list[Message | None]"
OnError = Literal["stop", "skip"]
ENGINE = Engine()
LOSSES = {"loss": False, "router_loss": False, "sft_loss": False}
POLICY = "policy"  # the role of the model that the recipe trains


@dataclass(frozen=True)
class Prepared:
    """A window to train on, and its metrics."""

    examples: Sequence[Features]  # of the global window; columns may be floats
    figures: Mapping[str, float] = field(default_factory=dict)  # logged; metrics of an evaluation
    state: Mapping[str, float] = field(default_factory=dict)  # for the next window of training
    # what is recorded of each example that was loaded, as ``Loss.rows``, where it is known before
    rows: Sequence[float] | None = None


class StageContext(Protocol):
    """What a stage may compute before it trains. Results are global: the same on every rank, one
    per example, on the host."""

    @property
    def codec(self) -> Codec:
        """Tokenizer and chat template."""

    @property
    def seed(self) -> int:
        """Of what is drawn: of this window and no other."""

    @property
    def state(self) -> Mapping[str, float]:
        """The ``Prepared.state`` of the last window, which checkpoints contain; empty at first."""

    def compute(self, role: str, examples: Sequence[Features]) -> list[Outputs]:
        """The outputs of a role's model for each example, as its spec says."""

    def reduce(
        self, role: str, examples: Sequence[Features], function: Reduction
    ) -> NDArray[np.float64]:
        """[examples, ...] the result of ``function`` for a batch's outputs, a row per example: less
        to send than the outputs of every token."""

    def generate(
        self, prompts: Prompts, settings: GenerateSection, *, turn: int = 0
    ) -> list[Sample]:
        """One sampled response of the policy for each prompt. Each ``turn`` of a window draws other
        numbers."""

    def environment(self, path: FunctionPath, events: Events, seconds: float) -> Replies:
        """What a user's environment says to each response; computed on one rank."""

    def reward(
        self, rewards: Rewards, rollouts: Rollouts, seconds: float, on_error: OnError
    ) -> Rewarded:
        """Of each reward those of all rollouts, None where there is none. A reward by a model has
        the role of its name."""


class Stage(ABC):
    """One training objective: what differs from here. Its fields are its settings in the recipe."""

    uses_template: ClassVar[bool] = True  # whether its examples are conversations ...
    reads_texts: ClassVar[bool] = False  # ... or plain texts, which need no template
    reads_pictures: ClassVar[bool] = False  # or a row with pictures stops the run
    reads_pairs: ClassVar[bool] = True  # of rows with a response of their own, too, or that one
    kept_by: ClassVar[Literal["item", "window"]] = "item"  # what ``precompute`` depends on
    metric: ClassVar[str] = "loss"  # of evaluations, by which checkpoints are compared
    # what ``Loss.rows`` or ``Prepared.rows`` are, and whether greater ones are better
    row_metric: ClassVar[tuple[str, bool]] = ("loss", False)
    # of each metric that can be better, as ``rewards/*``, whether it is if it is greater
    better_if_greater: ClassVar[Mapping[str, bool]] = {}  # beside those of LOSSES

    @property
    def row_columns(self) -> frozenset[str]:
        """The columns that it reads beside the texts of a row."""
        return frozenset()

    @property
    def encoding(self) -> str:
        """Version of what ``encode`` makes, and the settings on which that depends: in the key of
        cached datasets."""
        return ""

    @property
    def heads(self) -> Mapping[str, int]:
        """Outputs that need a head of their own, on the policy: how many numbers each gives."""
        return {}

    @property
    def classes(self) -> Classes | None:
        """What the numbers of its head mean, if they are logits of classes."""
        return None

    @property
    def min_window(self) -> int:
        """Examples that ``prepare`` must be given together."""
        return 1

    @property
    @abstractmethod
    def spec(self) -> OutputSpec:
        """The outputs of the policy that the loss reads."""

    @property
    def eval_spec(self) -> OutputSpec:
        """The same in an evaluation, which may measure more."""
        return self.spec

    @property
    def auxiliary(self) -> Mapping[str, AuxiliaryModel]:
        """Models beside the policy, by role."""
        return {}

    @property
    def passes(self) -> int:
        """How often a prepared window is trained on."""
        return 1

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of each pass."""
        return 1

    @property
    def group_size(self) -> int:
        """Examples that ``prepare`` makes of each one that was loaded."""
        return 1

    @property
    def max_new_tokens(self) -> int:
        """Tokens that it adds to each of them at most."""
        return 0

    @property
    def sampler(self) -> Sampler:
        """Where the policy's responses are sampled in training."""
        return ENGINE

    @abstractmethod
    def encode(self, examples: Sequence[Example], codec: Codec) -> list[Encoded]:
        """Turn examples into token lists: one entry per example, its features or why it was
        dropped. The same whatever its settings are, but for those in ``encoding``."""

    def collate(self, features: Sequence[Features], *, packing: bool) -> Batch:
        """Turn token lists into one micro-batch, without columns that do not exist yet."""
        return packed_or_padded(features, packing=packing)

    def precompute(self, context: StageContext, examples: Sequence[Features]) -> Sequence[Features]:
        """Examples with the columns that auxiliary models compute before the first step. They are
        cached on disk: by item if they do not depend on other examples, or by global window."""
        return examples

    def try_out(  # noqa: B027 - most stages run nothing of a user's
        self, examples: Iterator[Example], process: RewardProcess
    ) -> None:
        """Call what a user wrote for this stage on the first of ``examples``, in ``process``, which
        is no other run's: before a model is loaded, on rank 0. Raises ``RunError``."""

    def prepare(self, context: StageContext, examples: Sequence[Features]) -> Prepared:
        """What to train on of a global window: rollouts, advantages, metrics of the window."""
        return Prepared(examples)

    def without(self, row: Features) -> Features | None:
        """What stands in the place of a row that is omitted from its step: as long, without loss
        and weight. None: nothing can, as what is trained is sampled, and differs then."""
        return None if self.max_new_tokens else without_labels(row)

    @abstractmethod
    def loss(self, role: str, outputs: Outputs, batch: Batch) -> Loss:
        """What to minimize on one micro-batch, for the trained model of a role. Pure: no model is
        called here."""

    def metrics(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics of an evaluation, from its mean ``loss`` and the means of related metrics."""
        return means

    def judged(self, outputs: Outputs, batch: Batch) -> torch.Tensor | None:
        """[E, X] Of each example of an evaluation what ``summary`` is made of; rows of NaN do not
        count. None: nothing."""
        return None

    def summary(self, rows_EX: NDArray[np.float64]) -> Mapping[str, float]:
        """Metrics of all examples of an evaluation together that are no means over them. They do
        not depend on the order of the examples."""
        return {}

    def remarks(
        self, examples: EncodedDataset, evals: Mapping[str, EncodedDataset]
    ) -> Iterator[str]:
        """What is unusual about the examples to train on, or about those of ``evals``, and what to
        do about it; logged when a run starts. Raises ``DataError``: nothing can be learned."""
        return iter(())

    def problems(self, data: DataSection, parallel: ParallelSection) -> Iterator[Problem]:
        """Settings of other sections that this stage does not support."""
        return iter(())


def is_greater_better(stage: type[Stage], metric: str, datasets: Iterable[str]) -> bool | None:
    """Whether greater values of ``metric``, of an evaluation on one of ``datasets`` or of training,
    are better; None if ``stage`` does not say so."""
    name = metric.removeprefix("eval_")
    own = next((d for d in datasets if name.startswith(f"{d}_")), None)
    names = [name] if own is None else [name, name.removeprefix(f"{own}_")]
    rules = {**LOSSES, **stage.better_if_greater}.items()
    return next((is_so for n in names for rule, is_so in rules if fnmatchcase(n, rule)), None)


def metrics_of(stage: type[Stage]) -> list[str]:
    """The metrics of which ``stage`` says whether greater values are better."""
    return sorted({**LOSSES, **stage.better_if_greater})


def auxiliary_models(stage: Stage, when: Literal["ahead", "window"]) -> dict[str, AuxiliaryModel]:
    """The auxiliary models of a stage that compute ``when``, by role."""
    return {role: model for role, model in stage.auxiliary.items() if model.when == when}


def longest_row(stage: Stage, encoded: int, cutoff_len: int) -> int:
    """Tokens of the longest row that a stage may make of examples of up to ``encoded`` tokens, less
    what it generates: where examples are compared in windows, of the prompt of one with the
    response of another."""
    return min(cutoff_len, encoded * (2 if stage.kept_by == "window" else 1))
