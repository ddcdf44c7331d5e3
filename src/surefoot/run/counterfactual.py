"""What some rows did: steps of a run computed twice from the same state, as they were and without
these rows.

Order, lengths, packing and random numbers are the same in both arms, so what differs comes from the
rows alone: where none of them is, the steps are equal to the bit. A step without a row is the
mean over those that are left, as of a run that never had it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from signal import Signals

import torch

from ..data.order.loader import Omitted
from ..data.section import DataSection
from ..data.training_data import row_places
from ..errors import RunError
from ..parallel.progress import wait_for_ranks
from ..parallel.world import World
from ..storage import files
from ..training.arguments import Context
from ..training.callback import TrainerControl, TrainerState
from ..training.callbacks.step_files import STEPS, read_step_file
from ..training.trainer import Trainer
from .replay import ReplayPlan, ReplayReport, Watcher, compute
from .row_gradients import run_again, set_aside


@dataclass(frozen=True)
class ArmMetrics:
    """What the steps of one arm came to."""

    losses: Mapping[int, float]  # mean of each step, over the rows in common
    norms: Mapping[int, float]
    evaluation: Mapping[str, float]  # after the last step; empty: nothing is evaluated


@dataclass(frozen=True)
class Counterfactual:
    """What the steps were, and what they are without ``rows``."""

    replay: ReplayReport  # as they were
    rows: Sequence[str]
    steps: Sequence[int]  # which have these rows
    before: ArmMetrics
    without: ArmMetrics


@dataclass
class _Arm(Watcher):
    """Measures the steps of ``plan``, over what both arms have in common."""

    plan: ReplayPlan
    rows: Sequence[str]
    _: KW_ONLY
    is_without: bool
    steps: list[int] = field(default_factory=list)  # as they were, which have these rows
    outcome: ArmMetrics = field(init=False)
    _trainer: Trainer | None = None
    _omitted: Omitted | None = None
    _common: dict[int, float] = field(default_factory=dict)  # mean loss without the rows

    def watch(self, trainer: Trainer, section: DataSection) -> None:
        """Find the rows. Raises ``RunError``: there is none of this name, or none can be omitted
        from the steps of this stage."""
        loader, stage = trainer.windows.loader, trainer.stage
        order = loader.order
        known = order.examples.reach(self._most_rows(trainer))
        places = map(_named, row_places(section, order.examples, range(known)))
        wanted, found = {_named(row): row for row in self.rows}, dict[int, str]()
        for item, place in enumerate(places):
            if place in wanted:
                found[item] = place
        if unknown := [row for place, row in wanted.items() if place not in found.values()]:
            raise RunError(
                f"--without {unknown[0]}: no row that is trained on has this place; `surefoot rows "
                f"{self.plan.run} --step {self.plan.first}` names those of a step, as FILE: line N"
            )
        if stage.without(order.examples[min(found)]) is None:
            raise RunError(
                "--without: the responses that these steps train on are sampled, and sampled "
                "differently once a weight is another one, so no row can be omitted from them alone"
            )
        self._omitted = Omitted(found.keys(), lambda row: stage.without(row) or row)
        self._trainer = trainer
        if self.is_without:
            trainer.windows.omitted = self._omitted

    def on_pre_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """The gradients of the step are there."""
        trainer, omitted = self._trainer, self._omitted
        assert trainer is not None, "watch() comes first"
        assert omitted is not None, "watch() comes first"
        examples = trainer.windows.without(omitted)
        if self.is_without or examples is trainer.windows.step_examples:
            return
        self.steps.append(state.global_step + 1)
        with set_aside(trainer):
            losses = run_again(trainer, trainer.windows.loader.deal(examples))
        parts = [torch.stack([loss.total.double(), loss.weight.double()]) for loss in losses]
        sums = trainer.policy.step.sums(torch.stack(parts).sum(0).detach())
        self._common[state.global_step + 1] = _mean(*wait_for_ranks(sums.tolist))

    def finish(self) -> None:
        """``outcome`` is there."""
        trainer, plan = self._trainer, self.plan
        assert trainer is not None, "watch() comes first"
        folder = trainer.section.folder
        recorded = trainer.world.on_main(lambda: read_step_file(folder, STEPS).tolist())
        losses, norms = dict[int, float](), dict[int, float]()
        for step in range(plan.first, plan.last + 1):
            loss, norm, weight, _ = recorded[step - 1]
            losses[step], norms[step] = _mean(loss, weight), norm
        evaluation = trainer.measure(trainer.evals, "eval") if trainer.evals else {}
        self.outcome = ArmMetrics({**losses, **self._common}, norms, evaluation)

    def _most_rows(self, trainer: Trainer) -> int:
        """Rows among which those of the steps are: of a stream, its blocks are drawn from."""
        loader = trainer.windows.loader
        return self.plan.last * loader.global_batch_size + (loader.order.buffer_size or 0)


def _named(place: str) -> str:
    """The place of a row in one way of the several in which people write it."""
    return re.sub(r": (?:line|row) (?=\d+$)", ":", place).removeprefix(f"{Path.cwd()}/")


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else 0.0


def compute_both(
    run: Path, steps: tuple[int, int], rows: Sequence[str], scratch: Path, world: World
) -> Counterfactual | Signals:
    """Compute the first to the last of ``steps`` of ``run`` twice in ``scratch``, as they were and
    without ``rows``, named by their places; or the signal that broke this off. Raises ``RunError``.
    A collective call."""
    first, last = steps
    plan = world.on_main(lambda: ReplayPlan.of(run, first, last))
    if plan.start_step < first - 1:  # both begin with the state before the first step
        until = world.on_main(lambda: ReplayPlan.of(run, first - 1, first - 1))
        place = scratch / "until"
        world.on_main(lambda: files.make_folder(place))
        report = compute(until, place, world, companions={})
        if report.signal is not None:
            return report.signal
        arms = [arm for arm in plan.arms if arm.last >= first]
        plan = replace(plan, start=place / f"checkpoint-{first - 1}", arms=arms)
    before, without = (_Arm(plan, rows, is_without=is_without) for is_without in (False, True))
    reports = list[ReplayReport]()
    for name, arm, of_arm in (
        ("before", before, plan),
        ("without", without, replace(plan, saved=None)),
    ):
        place = scratch / name
        world.on_main(lambda: files.make_folder(place))  # noqa: B023 - called at once
        reports.append(compute(of_arm, place, world, watching=[arm]))
        if (signal := reports[-1].signal) is not None:
            return signal
    return Counterfactual(reports[0], rows, before.steps, before.outcome, without.outcome)
