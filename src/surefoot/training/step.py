"""One optimizer step: forward and backward over a window, one normalization, clipping, the update.

Nothing waits for the device: the metrics of a step stay there to be read later, and a step whose
loss or gradient is NaN or infinite is not applied.

A ``Learner`` is a network that is trained, with its optimizer; ``InitialValues`` are those that it
had before the first step. At the end are the messages about steps whose loss or gradient is NaN,
infinite or exactly 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..batch import Batch, Hook, Loss, LossFunction, Outputs, StepRunner, Window, with_router_loss
from ..checkpoint.state.roles import ShardedState
from ..errors import RunError, counted
from ..model.numerics import LossScaler, leave_strict_mode
from ..model.routers import RouterBiases
from ..model.weight_matrices import is_added
from ..network.method import Weights
from ..network.network import Network
from ..optim.bf16_weights import move_weights
from ..optim.optimizer import Schedule
from ..optim.trained import TrainedParameters
from ..parallel.progress import wait_for_ranks
from ..parallel.sharded_model import gather_nothing, global_norm
from ..parallel.world import local
from .section import TrainSection

logger = logging.getLogger(__name__)
_SELDOM = 10  # steps between two lines of the log about blocks
NUM_ZERO = 10  # steps without a gradient, before a run that samples warns
MAX_ROLLBACKS = 3  # to one checkpoint: more bad windows than that are no accident
Reduce = Callable[[torch.Tensor], torch.Tensor]  # each of some float64 values, over processes


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step. Sums are over the complete window, of all ranks."""

    loss: float  # sum
    weight: float  # what it is a sum over
    grad_norm: float  # before clipping
    learning_rate: float
    metrics: dict[str, float]  # sums
    num_tokens: int  # padding not counted
    scale: float = 1.0  # of the loss, in fp16
    # ``Loss.rows`` of this rank's micro-batches, on the host; empty if the loss has none
    rows: Sequence[torch.Tensor] = ()

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return all(abs(x) < float("inf") for x in (self.loss, self.grad_norm))  # false for nan too

    @property
    def is_usable(self) -> bool:
        """Whether to continue: all is finite, or fp16's scale was too high and corrects itself."""
        return self.is_finite or (self.scale > 1.0 and abs(self.loss) < float("inf"))


@dataclass(frozen=True)
class PendingMetrics:
    """The metrics of a step while they are copied to the host, which ``read`` waits for."""

    values: torch.Tensor  # loss, weight, tokens, metrics, grad_norm: float64, soon on the host
    names: Sequence[str]  # of the metrics
    is_bad: torch.Tensor  # on the device, float32: 1 if loss or gradient are no numbers
    learning_rate: float
    scale: float
    rows: Sequence[torch.Tensor] = ()  # of each micro-batch, soon on the host
    sent: torch.cuda.Event | None = None  # when they are there

    def read(self) -> StepMetrics:
        """The metrics."""
        if self.sent is not None:
            wait_for_ranks(self.sent.synchronize)
        loss, weight, tokens, *metrics, norm = self.values.tolist()
        by_name = dict(zip(self.names, metrics, strict=True))
        return StepMetrics(
            loss, weight, norm, self.learning_rate, by_name, int(tokens), self.scale, self.rows
        )


def all_or_none(steps: Sequence[PendingMetrics]) -> list[PendingMetrics]:
    """The same steps of several networks; if one of them is bad, all are."""
    if len(steps) == 1:
        return list(steps)
    is_bad = torch.stack([step.is_bad for step in steps]).amax(0)
    return [replace(step, is_bad=is_bad) for step in steps]


@dataclass
class Step:
    """The parts of an optimizer step: ``gradients`` runs the window, ``update`` applies it."""

    optimizer: torch.optim.Optimizer
    schedule: Schedule
    run_window: StepRunner
    max_grad_norm: float
    scaler: LossScaler
    sums: Reduce = _alone  # over all shares of the examples
    totals: Reduce = _alone  # over all processes
    copies: Collection[torch.Tensor] = frozenset()  # parameters that count in another process
    biases: RouterBiases | None = None  # which an update moves
    _expert_counts: torch.Tensor | None = field(init=False, default=None)  # of the window

    def gradients(
        self, window: Window, loss_of: LossFunction, *, step: int, before: Hook, after: Hook
    ) -> PendingMetrics:
        """Leave the normalized, clipped gradient of ``window`` in the parameters. It is divided
        once, by the weight of all micro-batches together, so accumulation changes it only by float
        rounding."""
        learning_rate, scale = self._set_learning_rate(step), self.scaler.scale
        factor = self._factor(window)
        scaled = partial(_scaled, loss_of, factor)
        move_weights(self.optimizer, for_gradients=True)
        if self.biases is not None:
            self.biases.take()  # what a window that failed has left
        # A sum and a weight of each micro-batch: a mean of means would give short micro-batches
        # more weight (as trl#3021 did).
        losses = self.run_window(window, scaled, before=before, after=after)
        if self.biases is not None:  # before a callback computes more of the window
            self._expert_counts = self.sums(self.biases.take())
        tokens = sum(batch.num_tokens for batch in window if batch.num_trained)
        names = list(dict.fromkeys(name for loss in losses for name in loss.metrics))
        total, weight, *rest = self.sums(_added(losses, names, tokens)).unbind()
        norm = self._normalise(weight * factor)
        total = total / factor
        is_bad = ~(total.isfinite() & norm.isfinite())
        values = torch.stack([total, weight, *rest, norm])
        rows = [loss.rows for loss in losses if loss.rows is not None]
        pending = PendingMetrics(values, names, is_bad.float(), learning_rate, scale, rows)
        return _on_its_way(pending)

    def update(self, unread: PendingMetrics) -> None:
        """Update the weights, unless loss or gradient are NaN or infinite; update fp16's scale."""
        if all(group.get("fused") for group in self.optimizer.param_groups):
            # GradScaler's own door: fused optimizers skip the update on the device, and the host
            # need not wait to know.
            self.optimizer.found_inf = unread.is_bad  # type: ignore[attr-defined]
            self.optimizer.step()  # which looks at it on the device
        elif not wait_for_ranks(bool, unread.is_bad):
            self.optimizer.step()
        move_weights(self.optimizer, for_gradients=False)
        if self.biases is not None and self._expert_counts is not None:
            self.biases.update(self._expert_counts, unread.is_bad)
        if self.scaler.enabled:
            self.scaler.update(overflowed=wait_for_ranks(bool, unread.is_bad))

    def _set_learning_rate(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            peak = group.setdefault("peak_lr", group["lr"])
            group["lr"] = peak * self.schedule.factor(step)
        return float(self.optimizer.defaults["lr"]) * self.schedule.factor(step)

    def _factor(self, window: Window) -> float:
        """The factor of the loss for the backward pass: 1, but in fp16 the scale per trained token.
        A sum over thousands of tokens would overflow fp16 long before the scale is of any use."""
        if not self.scaler.enabled:
            return 1.0
        here = sum(batch.num_trained for batch in window)
        trained = self.sums(torch.tensor([here], dtype=torch.float64))
        return self.scaler.scale / max(1.0, wait_for_ranks(float, trained))

    def _normalise(self, divisor: torch.Tensor) -> torch.Tensor:
        """Divide all gradients and clip them, in one pass; their global norm before clipping."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        divisor = torch.where(divisor == 0, 1.0, divisor)
        counted = [g for p, g in gradients.items() if p not in self.copies]
        norm = global_norm(counted, self.totals, divisor.device).double() / divisor
        factor = 1 / divisor
        if self.max_grad_norm > 0:  # as torch.nn.utils.clip_grads_with_norm_
            factor = factor * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        _multiply([local(gradient) for gradient in gradients.values()], factor)
        return norm


def _added(losses: Sequence[Loss], names: Sequence[str], tokens: int) -> torch.Tensor:
    """Total, weight, tokens and metrics of a window, float64."""
    none = losses[0].total.new_zeros((), dtype=torch.float64)
    rows = [
        [loss.total, loss.weight, none, *(loss.metrics.get(name, none) for name in names)]
        for loss in losses
    ]
    totals = torch.stack([torch.stack([x.double() for x in row]) for row in rows]).sum(0)
    totals[2] += tokens
    return totals


def _multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for dtype in {gradient.dtype for gradient in gradients}:
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        if dtype.itemsize > 2:
            torch._foreach_mul_(alike, factor.to(alike[0]))
            continue
        for gradient in alike:  # of 16 bits the factor itself would be off by up to 0.4 %
            gradient.copy_(gradient.float() * factor.float())


def _on_its_way(pending: PendingMetrics) -> PendingMetrics:
    """Send the values to the host."""
    if pending.values.device.type != "cuda":
        rows = [values.cpu() for values in pending.rows]
        return replace(pending, values=pending.values.cpu(), rows=rows)
    values, sent = pending.values.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    rows = [values.to("cpu", non_blocking=True) for values in pending.rows]
    sent.record()
    return replace(pending, values=values, rows=rows, sent=sent)


def _scaled(loss_of: LossFunction, factor: float, outputs: Outputs, batch: Batch) -> Loss:
    loss = with_router_loss(loss_of(outputs, batch), outputs)
    return loss if factor == 1.0 else replace(loss, total=loss.total * factor)


@dataclass
class Learner:
    """One trained network."""

    network: Network
    step: Step  # its optimizer is that of ``trained``
    trained: TrainedParameters
    # What a checkpoint contains of the optimizer; the ranks of a pipeline make it together, once,
    # as only rank 0 loads the best weights at the end of a run.
    optimizer_state: ShardedState = field(init=False)
    # The step of the last line of the log about blocks.
    _last_logged: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.optimizer_state = self.network.engine.optimizer_state(self.trained)

    def optimizer_at(self, step: int) -> torch.optim.Optimizer:
        """The optimizer for update ``step``; the log tells when it trains another block."""
        blocks, last_logged = self.network.blocks, self._last_logged
        if blocks.switch and (last_logged is None or step - last_logged >= _SELDOM):
            labels = blocks.labels(step)
            if last_logged is None or labels != blocks.labels(step - 1):
                last = (step // blocks.interval + 1) * blocks.interval
                what = " and ".join(labels)
                logger.info("steps %d to %d train %s", step + 1, last, what)
                self._last_logged = step
        return self.trained.at(step)

    @property
    def module(self) -> nn.Module:
        """The model with its adapter."""
        return self.network.module

    @property
    def num_saved_bytes(self) -> int:
        """About the bytes of this rank's part of a checkpoint, once the optimizer has a state."""
        is_full = self.weights.kind == "full"
        named = self.module.named_parameters()
        weights = [p for name, p in named if is_full or p.requires_grad or is_added(name)]
        states = self.step.optimizer.state.values()
        moments = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(local(tensor).nbytes for tensor in [*weights, *moments])

    def drop_gradients(self) -> None:
        """Free what a forward or backward pass that failed has left."""
        # Memory runs out in attention's backward pass, for one. In strict mode the next pass would
        # fail at the first operation without a deterministic algorithm.
        leave_strict_mode()
        self.module.zero_grad(set_to_none=True)
        self.trained.drop_gradients()
        gather_nothing(self.module)

    def undo(self, step: int) -> None:
        """Be as after ``step`` updates: a later one has begun, and is not made."""
        self.drop_gradients()
        move_weights(self.step.optimizer, for_gradients=False)
        # A method that trains another block from here on has begun it; a resume expects the state
        # of the block before, of which only what the new one shares is used.
        self.step.optimizer = self.trained.at(max(0, step - 1))

    @property
    def weights(self) -> Weights:
        """What a checkpoint contains of the model."""
        return self.network.weights


@dataclass
class InitialValues:
    """This rank's share of the trainable weights of ``network``, as they are now."""

    network: Network
    _values: Mapping[str, torch.Tensor] = field(init=False)
    _is_in_place: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        parameters = self.network.named.items()
        self._values = {name: wait_for_ranks(_local(p).cpu).clone() for name, p in parameters}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the network has these values."""
        assert not self._is_in_place
        self._exchange()
        self._is_in_place = True
        try:
            yield
        finally:
            self._exchange()
            self._is_in_place = False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap them, one tensor at a time; nothing stays gathered of other values."""
        gather_nothing(self.network.module)
        for name, parameter in self.network.named.items():
            live, stored = _local(parameter), self._values[name]
            current = wait_for_ranks(live.cpu).clone()
            live.copy_(stored)
            stored.copy_(current)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def explain(step: int, figures: StepMetrics) -> str:
    """What was found, for a message."""
    loss = figures.loss / max(1, figures.weight)
    return f"step {step}: loss {loss}, gradient norm {figures.grad_norm}"


def warn_of_skip(what: str, section: TrainSection, count: int) -> None:
    """Log that an update was skipped, the ``count``-th of the run."""
    logger.warning(
        "%s: the update is skipped (%s so far; the run stops at more than %d, "
        "train.max_skipped_steps)",
        what,
        counted(count, "step"),
        section.max_skipped_steps,
    )


def warn_of_rollback(what: str, checkpoint: Path, count: int) -> None:
    """Log that a run is back at ``checkpoint``, and skips its ``count``-th batch."""
    logger.warning(
        "%s: rolled back to %s, skipping the batch of this step (%s so far)",
        what,
        checkpoint.name,
        counted(count, "batch", "batches"),
    )


def check_gradient(figures: StepMetrics, step: int, num_zero: int, *, samples: bool) -> None:
    """Raise ``RunError`` if the first gradient of a run is exactly 0: then all of them are, as
    nothing is drawn. Where responses are sampled, a window of equal rewards has none, so that only
    ``num_zero`` steps of a launch without any are worth a warning."""
    if figures.grad_norm != 0 or figures.scale > 1:
        return
    if not samples and step == 1:
        raise RunError(
            "training stopped: all gradients of the first step are exactly 0, so nothing would be "
            "learned: the loss does not depend on what is trained. Compare the loss with what "
            "method trains, and a teacher with its student"
        )
    if num_zero == NUM_ZERO:
        logger.warning(
            "all gradients of the first %d steps of this launch are exactly 0; look at the rewards "
            "of some responses (`surefoot rollouts RUN`, `surefoot reward check RECIPE`)",
            num_zero,
        )


def give_up(what: str, section: TrainSection, newest: Path | None, *, skipped: int) -> RunError:
    """The error of a run that cannot continue as ``on_nan`` says; ``skipped`` counts its steps."""
    latest = newest or "no checkpoint has been saved yet"
    reasons = {
        "stop": "",
        "skip": f", and {counted(skipped, 'step')} skipped is more than train.max_skipped_steps "
        f"({section.max_skipped_steps})",
        "rollback": f", after {counted(MAX_ROLLBACKS, 'rollback')} to the latest checkpoint"
        if newest
        else ", and there is no checkpoint to roll back to",
    }
    ways = {
        "stop": "set train.on_nan to skip or rollback",
        "skip": "raise train.max_skipped_steps",
        "rollback": "set train.on_nan to skip",
    }
    return RunError(
        f"training stopped: {what} is NaN or infinite{reasons[section.on_nan]}. Latest checkpoint: "
        f"{latest}. Lower the learning rate (optim), inspect the data of that step, or "
        f"{ways[section.on_nan]}"
    )
