"""A stage with a loss, a collation or metrics of the caller's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ...batch import Batch, Loss, LossFunction, Outputs, OutputSpec
from ...errors import RecipeError, RunError
from ...extensions import Extended
from ...schema import is_section
from ...storage.files import digest
from ...training.stage import POLICY, Stage

if TYPE_CHECKING:
    import torch

Collation = Callable[..., Batch]  # (features, *, packing), as ``Stage.collate``
MetricFunction = Callable[[Outputs, Batch], Mapping[str, "torch.Tensor"]]
GIVEN = tuple(f"{part} given from Python" for part in ("loss", "collation", "metric"))
MEASURED = ("logps", "predictions")  # what ``metrics`` reads, computed in evaluations


@dataclass(frozen=True)
class StageParts:
    """What replaces members of a recipe's stage; None: its own."""

    loss: LossFunction | None = None
    loss_outputs: Sequence[str] = ("logps",)  # fields of ``Outputs`` that ``loss`` reads
    collate: Collation | None = None
    metrics: MetricFunction | None = None  # sums over the weight of the loss

    def code(self) -> dict[str, str]:
        """The given functions, and hashes of their source."""
        given = zip(GIVEN, (self.loss, self.collate, self.metrics), strict=True)
        return {role: _hash(function) for role, function in given if function is not None}

    def of(self, stage: Stage) -> Stage:
        """``stage`` with these parts. Raises ``RecipeError`` for outputs that do not exist."""
        members: dict[str, object] = {}
        spec, eval_spec = stage.spec, stage.eval_spec
        if self.loss is not None:
            spec = eval_spec = _spec(self.loss_outputs)
            members["metrics"] = Stage.metrics  # no perplexity of another loss
        if self.metrics is not None:
            names = dict.fromkeys((*eval_spec.outputs, *MEASURED))
            eval_spec = replace(eval_spec, outputs=tuple(names))
        if self.loss is not None or self.metrics is not None:
            members |= {"spec": spec, "eval_spec": eval_spec, "loss": self._loss_of(stage)}
        if self.collate is not None:
            members["collate"] = staticmethod(self.collate)
        return _with_members(stage, members) if members else stage

    def _loss_of(self, stage: Stage) -> Callable[[object, str, Outputs, Batch], Loss]:
        loss, metrics = self.loss, self.metrics

        def compute(_self: object, role: str, outputs: Outputs, batch: Batch) -> Loss:
            is_own = loss is not None and role == POLICY
            found = loss(outputs, batch) if loss and is_own else stage.loss(role, outputs, batch)
            if not isinstance(found, Loss):
                kind = type(found).__name__
                raise RunError(f"loss: expected a surefoot.batch.Loss(total, weight), got {kind}")
            if metrics is None or outputs.predictions is None:
                return found
            return replace(found, metrics={**found.metrics, **metrics(outputs, batch)})

        return compute


AS_IN_THE_RECIPE = StageParts()


def _with_members(stage: Stage, members: Mapping[str, object]) -> Stage:
    """An instance of a new class with the settings of ``stage``. It has the same name, by which
    encoded datasets are cached: no part changes these."""
    cls: Any = type(stage)
    made = type(cls.__name__, (cls,), dict(members))
    found: Stage = made(**{one.name: getattr(stage, one.name) for one in fields(cls)})
    return found


def _spec(outputs: Sequence[str]) -> OutputSpec:
    try:
        return OutputSpec(tuple(outputs))
    except ValueError as error:
        raise RecipeError(f"loss_{error}") from None


def _hash(function: Callable[..., object]) -> str:
    try:
        return digest(inspect.getsource(function).encode())
    except (OSError, TypeError):  # typed at a prompt, or built in
        return digest(repr(getattr(function, "__qualname__", type(function))).encode())


def register(name: str, value: object, choices: Extended[type[Any]], protocol: type) -> None:
    """Make the class of ``value``, an instance of a stage, say, known under its name, unless it is
    known. Raises ``RecipeError`` if that name is another class's, or if it lacks members of
    ``protocol``."""
    if not is_section(value) or type(value) in choices.values():
        return
    cls = type(value)
    if cls.__name__ in choices:
        raise RecipeError(f"{name}: there is another {cls.__name__}; give the class its own name")
    declared = (*vars(protocol), *inspect.get_annotations(protocol))
    missing = [one for one in declared if not one.startswith("_") and not hasattr(value, one)]
    if missing:
        raise RecipeError(
            f"{name}: the class {cls.__name__} has no {', '.join(missing)}; add what "
            f"{protocol.__module__}.{protocol.__name__} declares"
        )
    choices.own[cls.__name__] = cls
