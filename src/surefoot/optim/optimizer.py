"""``Optimizer``: the settings that all have, the torch optimizer that they make, and its state as
it is declared; its schedule; and the groups of its parameters. A schedule is a pure function of the
step, but for ``reduce_lr_on_plateau``, whose state a run saves (``plateau``).

Steps count from 0: the first update uses ``factor(0)``. The warmup rises over ``warmup_steps``
updates and is never zero (the Hugging Face schedules waste their first step at zero). To add a
schedule: write its function, add its line to ``SCHEDULES``.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from ..errors import RecipeError, counted, did_you_mean
from ..schema import KEPT, Needs, must
from ._rules import modules as rules
from .plateau import Plateau, Reductions
from .state_tensor import ParameterKind, ParameterKinds, Shape, StateTensor, check_kinds, layout_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ._rules.rule_optimizer import Points, Update


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """One optimizer: what differs from here. Its fields are its settings in the recipe. It says how
    one parameter is updated (``update``), and what it keeps for it (``state_tensors``)."""

    # whether the update of an entry depends on nothing but its own gradients and state, so that
    # some entries of a matrix can be trained without the others
    is_entrywise: ClassVar[bool] = False
    splits_matrices: ClassVar[bool] = False  # must know which matrices are fused in a parameter
    learning_rate: float = 5e-5
    """Peak learning rate."""
    learning_rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Factors of the learning rate for some parameters, by a part of their names:
    ``{embed_tokens: 0.1}``, ``{lora_B: 16}`` (LoRA+, arXiv:2402.12354), ``{layers.0: 0.5}``,
    ``{'*norm': 2}``. A pattern matches one or more parts of a name between its dots. ``tower``,
    ``projector`` and ``language`` are all parameters of that part of a model that reads pictures,
    adapters included."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warmup. ``wsd`` is warmup-stable-decay with a linear decay,
    ``wsd_cosine`` with a cosine. ``inverse_sqrt`` is 1 over the root of steps / warmup steps.
    ``reduce_lr_on_plateau`` is constant until evaluations no longer improve (``plateau``)."""
    warmup_ratio: Annotated[float, Needs("warmup_steps", (None,))] = 0.0
    """Share of all steps used for warmup."""
    warmup_steps: int | None = None
    """Steps of warmup; has precedence over ``warmup_ratio``."""
    min_lr_ratio: Annotated[float, Needs("schedule", _WITH_END)] = 0.0
    """Learning rate at the end, as a share of the peak (not for ``constant`` and
    ``inverse_sqrt``); the lowest of ``reduce_lr_on_plateau``."""
    decay_ratio: Annotated[float, Needs("schedule", ("wsd", "wsd_cosine"))] = 0.1
    """``wsd`` and ``wsd_cosine``: share of all steps in the final decay."""
    plateau: Plateau = Plateau()
    """``reduce_lr_on_plateau``: when it reduces, by ``train.metric_for_best_model``."""
    bf16_weights: Annotated[
        Literal["stochastic", "master", "nearest"], KEPT, Needs("model.dtype", ("bfloat16",))
    ] = "stochastic"
    """How bfloat16 weights (``model.dtype: bfloat16``) are updated. ``stochastic`` rounds each
    result up or down at random, so that updates are right in the mean. ``master`` updates a float32
    copy, which checkpoints contain. ``nearest`` rounds to the nearest value: updates below 0.2 % of
    a weight are lost."""
    offload_state: bool = False
    """Keep the state in main memory: for each update, that of some parameters at a time is copied
    to the GPU and back. Not for sharded parameters; without effect on a CPU."""
    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""

    def __post_init__(self) -> None:
        must(self, "be positive", "learning_rate")
        for pattern, factor in self.learning_rates.items():
            if factor < 0:
                raise ValueError(f"learning_rates must not be negative, got {factor} for {pattern}")
        must(self, "be from 0 to 1", "warmup_ratio", "min_lr_ratio", "decay_ratio")
        must(self, "not be negative", "warmup_steps", "weight_decay")
        if self.plateau != Plateau() and not self.follows_evaluations:
            raise ValueError(
                f"plateau has no effect on schedule {self.schedule}; set schedule to {ON_PLATEAU}"
            )

    @property
    def follows_evaluations(self) -> bool:
        """Whether the learning rate depends on the metrics of evaluations."""
        return self.schedule == ON_PLATEAU

    @property
    @abstractmethod
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Each tensor that it may keep for a parameter, by its key in torch's state."""

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The torch optimizer of ``named`` parameters; each group also has their ``names``.
        ``layouts`` says what each of them is in its model."""
        kinds = layouts or {}
        groups = self.groups(named, kinds)
        check_kinds(self, kinds)
        return rules.rule_optimizer.RuleOptimizer(
            *(groups, self.update_all, self.state_tensors, kinds),
            learning_rate=self.learning_rate,
            points=self.points,
        )

    def groups(self, named: Named, layouts: ParameterKinds) -> list[Group]:
        """The groups of ``named`` parameters, by learning rate and decay."""
        return parameter_groups(
            named,
            lambda name, num_dims: self.rate_of(layout_of(name, num_dims, layouts)),
            lambda name: factor_of(with_parts([name], layouts)[0], self.learning_rates),
            self.weight_decay,
        )

    def rate_of(self, kind: ParameterKind) -> float:
        """The peak learning rate of parameters of a kind."""
        return self.learning_rate

    @property
    def points(self) -> Points | None:
        """Where gradients are computed, if not at the weights that checkpoints contain."""
        return None

    def update_all(self, updates: Sequence[Update]) -> None:
        """Update all parameters of a step."""
        for update in updates:
            self.update(update)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        raise NotImplementedError

    def schedule_over(self, total_steps: int, reductions: Reductions | None = None) -> Schedule:
        """The learning-rate schedule of a run of ``total_steps``, with the state of the run."""
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * total_steps)
        return Schedule(
            name=self.schedule,
            total_steps=total_steps,
            warmup_steps=min(warmup, total_steps),
            min_ratio=self.min_lr_ratio,
            decay_steps=math.ceil(self.decay_ratio * total_steps),
            plateau=self.plateau if self.follows_evaluations else None,
            peak=self.learning_rate,
            reductions=reductions or Reductions(),
        )


def declared_state(optim: Optimizer, shape: Shape, layout: ParameterKind) -> dict[str, StateTensor]:
    """The tensors of the state of a parameter, by key."""
    tensors = optim.state_tensors.items()
    return {key: tensor for key, tensor in tensors if tensor.belongs_to(shape, layout)}


Named: TypeAlias = "Iterable[tuple[str, nn.Parameter]]"
Group: TypeAlias = dict[str, object]
logger = logging.getLogger(__name__)


def parameter_groups(
    named: Named,
    rate_of: Callable[[str, int], float],
    factor_of: Callable[[str], float],
    weight_decay: float,
) -> list[Group]:
    """Groups for a torch optimizer: parameters of one learning rate that all decay (matrices), or
    none of which does (biases, norms and other vectors). Each also has ``names``, parallel to
    ``params``, so that its state can be saved by name. ``rate_of`` returns the learning rate of a
    parameter, by its name and its number of dimensions, ``factor_of`` that of
    ``learning_rates``."""
    groups: dict[object, Group] = {}
    for name, parameter in named:
        decay = weight_decay if parameter.ndim >= 2 else 0.0
        rate = rate_of(name, parameter.ndim) * factor_of(name)
        empty: Group = {"params": [], "names": [], "lr": rate, "weight_decay": decay}
        group = groups.setdefault((rate, parameter.ndim >= 2), empty)
        group["params"].append(parameter)  # type: ignore[attr-defined]
        group["names"].append(name)  # type: ignore[attr-defined]
    # of no parameters: a learning rate, no more
    return [*groups.values()] or [{"params": [], "names": [], "weight_decay": 0.0}]


def factor_of(name: str, learning_rates: Mapping[str, float]) -> float:
    """The factor of the learning rate of the parameter ``name``: that of the pattern that matches,
    otherwise 1."""
    return next((f for pattern, f in learning_rates.items() if matches(pattern, name)), 1.0)


def with_parts(names: Iterable[str], layouts: ParameterKinds) -> list[str]:
    """``names`` as patterns match them: of a model that reads pictures, below that of their part,
    ``tower.model.visual.patch_embed.proj.weight``."""
    return [f"{part}.{n}" if (part := layout_of(n, 0, layouts).part) else n for n in names]


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches consecutive parts of ``name``, which dots separate."""
    globs, parts = pattern.split("."), name.split(".")
    return any(
        all(fnmatchcase(parts[start + i], glob) for i, glob in enumerate(globs))
        for start in range(len(parts) - len(globs) + 1)
    )


def check_learning_rates(learning_rates: Mapping[str, float], names: Sequence[str]) -> None:
    """Raise ``RecipeError`` if a pattern matches none of the trainable parameters ``names``, or two
    match the same one."""
    owner: dict[str, str] = {}
    for pattern in learning_rates:
        matched = [name for name in names if matches(pattern, name)]
        if not matched:
            raise RecipeError(
                f"optim: learning_rates: {pattern!r} matches no trainable parameter"
                f"{_similar(pattern, names)}"
            )
        for name in matched:
            if name in owner:
                raise RecipeError(
                    f"optim: learning_rates: {owner[name]!r} and {pattern!r} both match {name}; "
                    "change one of them so that each parameter has one learning rate"
                )
            owner[name] = pattern


def log_learning_rates(
    rate: float, learning_rates: Mapping[str, float], names: Sequence[str]
) -> None:
    """Log which parameters have which learning rate, if they differ."""
    for pattern, factor in learning_rates.items():
        matched = [name for name in names if matches(pattern, name)]
        logger.info(
            "learning rate %g (%g x %g) for %r: %s, such as %s",
            rate * factor,
            rate,
            factor,
            pattern,
            counted(len(matched), "parameter"),
            matched[0],
        )


def _similar(pattern: str, names: Sequence[str]) -> str:
    """What to write instead of ``pattern``, for an error message."""
    name_parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    if hint := did_you_mean(pattern, name_parts):
        return hint
    return f"; expected a part of a name such as {names[0]}" if names else ""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor in [0, 1] of the peak learning rate for every step of a run."""

    name: ScheduleName
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0  # the factor at the end
    decay_steps: int = 0  # wsd only: how many of the last steps decay
    plateau: Plateau | None = None  # None: evaluations do not count
    peak: float = 1.0  # learning rate
    reductions: Reductions = field(default_factory=Reductions, compare=False)  # state of the run

    def factor(self, step: int) -> float:
        """Factor of the update number ``step`` (from 0)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return SCHEDULES[self.name](self, step)

    def evaluated(self, name: str, metric: float, step: int, *, greater: bool) -> None:
        """Take in the metric ``name`` of an evaluation after ``step`` updates. In the warmup none
        counts: there the rate itself still rises."""
        if self.plateau is not None and step >= self.warmup_steps:
            limits = {"peak": self.peak, "lowest": self.min_ratio}
            self.reductions.add(self.plateau, name, metric, greater=greater, **limits)


def _progress(step: int, start: int, total: int) -> float:
    """The progress of ``step`` from ``start`` to ``total``, in [0, 1]."""
    return min(1.0, max(0.0, (step - start) / max(1, total - start)))


def _cosine(schedule: Schedule, step: int) -> float:
    """Half a cosine from 1 to ``min_ratio`` (arXiv:1608.03983, without restarts)."""
    done = _progress(step, schedule.warmup_steps, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def _linear(schedule: Schedule, step: int) -> float:
    done = _progress(step, schedule.warmup_steps, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * (1 - done)


def _constant(_schedule: Schedule, _step: int) -> float:
    return 1.0


def _wsd(schedule: Schedule, step: int) -> float:
    """Warmup, constant, linear decay over the last ``decay_steps`` (arXiv:2404.06395)."""
    start = max(schedule.warmup_steps, schedule.total_steps - schedule.decay_steps)
    done = _progress(step, start, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * (1 - done)


def _wsd_cosine(schedule: Schedule, step: int) -> float:
    """As ``wsd``, with a decay along half a cosine (transformers' ``warmup_stable_decay``)."""
    start = max(schedule.warmup_steps, schedule.total_steps - schedule.decay_steps)
    done = _progress(step, start, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def _inverse_sqrt(schedule: Schedule, step: int) -> float:
    """The inverse root of the steps over those of warmup (arXiv:1706.03762); 10,000 if none."""
    scale = schedule.warmup_steps or 10_000
    return 1 / math.sqrt((step - schedule.warmup_steps + scale) / scale)


def _on_plateau(schedule: Schedule, _step: int) -> float:
    """What evaluations have left of the peak."""
    return schedule.reductions.factor


ON_PLATEAU = "reduce_lr_on_plateau"
SCHEDULES: dict[str, Callable[[Schedule, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "wsd_cosine": _wsd_cosine,
    "inverse_sqrt": _inverse_sqrt,
    ON_PLATEAU: _on_plateau,
}
_WITH_END = tuple(name for name in SCHEDULES if name not in ("constant", "inverse_sqrt"))
if TYPE_CHECKING:
    ScheduleName = str
else:  # the names that a recipe may give
    ScheduleName = Literal[tuple(SCHEDULES)]
