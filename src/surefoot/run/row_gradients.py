"""Each row's share of the gradient of a step that is computed again: whose row moved the weights.

At ``on_pre_optimizer_step`` the gradient of the step is in the parameters. It is set aside while
each row is run alone, and put back, as random numbers are: the steps after it stay what they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..batch import Batch, Features, Loss, Outputs, Window, with_router_loss
from ..checkpoint.state.states import RandomState
from ..data.section import DataSection
from ..data.text.preview import as_line
from ..data.training_data import row_places
from ..errors import RunError
from ..model.numerics import seed_everything
from ..parallel.world import local
from ..training.arguments import Context
from ..training.callback import TrainerControl, TrainerState
from ..training.callbacks.step_files import STEPS, read_step_file
from ..training.stage import POLICY
from ..training.trainer import Trainer
from .replay import Watcher

Gradients = dict[torch.nn.Parameter, torch.Tensor]


@dataclass(frozen=True)
class RowGradient:
    """One row of a step, run alone. Dropout draws other numbers for it than in its micro-batch."""

    place: str  # file and line, or its number among the responses of the window
    text: str  # as the model reads it; what is trained stands in [[ ]]
    loss: float  # sum
    weight: float  # of that sum
    norm: float  # of its gradient, divided by the weight of the step
    share: float  # of the step's gradient g: <g_row, g> / <g, g>; those of a step add up to 1

    @property
    def rank(self) -> float:
        """The first is the one to look at: whose gradient is NaN or infinite, or is most of it."""
        return abs(self.share) if math.isfinite(self.norm) else math.inf


@dataclass
class RowGradients(Watcher):
    """Measures the rows of ``step``."""

    step: int
    trainer: Trainer | None = None
    section: DataSection | None = None
    measured: list[RowGradient] = field(default_factory=list)  # the largest share first
    _rows: list[RowGradient] = field(default_factory=list)  # ``share`` is <g_row, g> / |g|

    def watch(self, trainer: Trainer, section: DataSection) -> None:
        """Measure the steps of ``trainer``, whose rows ``section`` describes. Raises ``RunError``:
        each rank has a part of the step."""
        self.trainer, self.section = trainer, section
        if trainer.world.size > 1:
            raise RunError(
                f"--rows: step {self.step} was computed on {trainer.world.size} ranks, and the "
                "gradient of each row is measured on one; `surefoot rows RUN --step "
                f"{self.step}` has the loss of each row"
            )

    def on_pre_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """The gradients of the step are there."""
        if self.trainer is not None and state.global_step + 1 == self.step:
            self._rows = list(self._alone(self.trainer))

    def finish(self) -> None:
        """``measured`` are the rows, by the sums of the step that is computed by now."""
        assert self.trainer is not None, "watch() comes first"
        metrics = read_step_file(self.trainer.section.folder, STEPS)[self.step - 1]
        weight, norm = float(metrics["weight"]), float(metrics["grad_norm"])
        # The step's gradient is the sum of the rows', divided by their weight and then clipped:
        # |sum| is norm * weight, whatever the clipping was.
        scale = (norm * weight) or math.nan
        rows = [
            RowGradient(r.place, r.text, r.loss, r.weight, r.norm / weight, r.share / scale)
            for r in self._rows
        ]
        self.measured = sorted(rows, key=lambda row: -row.rank)

    def _alone(self, trainer: Trainer) -> Iterator[RowGradient]:
        examples, section = trainer.windows.step_examples, self.section
        assert section is not None
        places = [f"example {number} of the window" for number in range(1, len(examples) + 1)]
        if (rows := trainer.windows.step_rows) is not None:
            places = row_places(section, rows.source, rows.items.tolist())
        codec = trainer.evaluation.context((0, 0)).codec
        with set_aside(trainer) as of_step:
            length = math.sqrt(_product(of_step, of_step))
            for place, item in zip(places, examples, strict=True):
                loss = _run_alone(trainer, item)
                of_row = _gradients(trainer)
                norm = math.sqrt(_product(of_row, of_row))
                along = _product(of_row, of_step) / length if length else math.nan
                sums = float(loss.total), float(loss.weight)
                yield RowGradient(place, as_line(codec, item), *sums, norm, along)


def _run_alone(trainer: Trainer, item: Features) -> Loss:
    """Leave the gradient of one row in the parameters."""
    for parameter in _gradients(trainer):
        parameter.grad = None
    (loss,) = run_again(trainer, [trainer.windows.loader.batching.collation.batch([item])])
    return loss


def run_again(trainer: Trainer, window: Window) -> Sequence[Loss]:
    """Add the gradient of micro-batches to those in the parameters, with the random numbers that
    micro-batches of this step draw."""
    stage, section, step = trainer.stage, trainer.section, trainer.state.global_step

    def loss_of(outputs: Outputs, batch: Batch) -> Loss:
        return with_router_loss(stage.loss(POLICY, outputs, batch), outputs)

    def before(index: int) -> None:
        seed_everything(section.seed, step, index, *trainer.world.draws)

    return trainer.policy.step.run_window(window, loss_of, before=before, after=lambda _: None)


def _gradients(trainer: Trainer) -> Gradients:
    parameters = trainer.policy.module.parameters()
    return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}


@contextmanager
def set_aside(trainer: Trainer) -> Iterator[Gradients]:
    """The gradients of the step, which are in the parameters again afterwards, as the random
    numbers to draw are."""
    random, of_step = RandomState(), _gradients(trainer)
    drawn = random.state_dict()
    for parameter in of_step:
        parameter.grad = None
    try:
        yield of_step
    finally:
        trainer.policy.module.zero_grad(set_to_none=True)
        for parameter, gradient in of_step.items():
            parameter.grad = gradient
        random.load_state_dict(drawn)


def _product(a: Gradients, b: Gradients) -> float:
    """The scalar product of two gradients, in float64."""
    products = [
        (local(a[parameter]).double() * local(b[parameter]).double()).sum()
        for parameter in a.keys() & b.keys()
    ]
    return float(torch.stack(products).sum()) if products else 0.0
