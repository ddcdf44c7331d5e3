"""What a replay has found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import counted
from ..terminal_text import one_line

if TYPE_CHECKING:
    from ..run.counterfactual import Counterfactual
    from ..run.replay import ReplayReport
    from ..run.row_gradients import RowGradient
    from ..run.trace import TraceReport

_SHOWN = 6  # figures and tensors that differ
_ROWS = 10  # rows of a step


def lines_of(report: ReplayReport) -> Iterator[str]:
    """What a replay has found, for people."""
    plan = report.plan
    begin = "the beginning of the run" if plan.start is None else plan.start.name
    yield f"replayed from {begin}: steps {plan.start_step + 1} to {report.reached}"
    yield from _of_lines(report)
    yield from _of_tensors(report)
    if not report.num_compared:
        yield _nothing(report)
    yield from _surroundings(report)
    for (step, is_evaluation), record in plan.logged.items():
        if plan.first <= step <= report.reached and not is_evaluation:
            names = ("loss", "grad_norm", "learning_rate")
            yield f"  step {step}: " + ", ".join(f"{n} {record[n]}" for n in names if n in record)


def _of_lines(report: ReplayReport) -> Iterator[str]:
    odd = {gap.step for gap in report.gaps}
    lines = counted(report.num_equal + len(odd), "logged line")
    if not odd:
        if report.num_equal:
            yield f"{lines}: equal to the bit"
        return
    if report.is_rounding:
        worst = max(report.gaps, key=lambda gap: gap.relative)
        yield (
            f"{lines}: equal up to rounding: largest difference {worst.relative:.2g} of "
            f"{worst.name}, first at step {min(odd)}"
        )
        return
    yield f"{lines}: {report.num_equal} equal to the bit; step {min(odd)} is the first that differs"
    for gap in [gap for gap in report.gaps if gap.step == min(odd)][:_SHOWN]:
        yield f"  {gap.name}: logged {gap.logged}, replayed {gap.replayed}"


def _of_tensors(report: ReplayReport) -> Iterator[str]:
    from ..run.replay import ROUNDING

    if report.tensors is None or (saved := report.plan.saved) is None:
        return
    tensors = f"{saved.name}: {counted(len(report.tensors), 'tensor')}"
    if not (odd := report.odd_tensors):
        yield f"{tensors}: equal to the bit"
        return
    name, worst = max(odd.items(), key=lambda item: item[1])
    how = "equal up to rounding" if worst <= ROUNDING else "other values"
    yield f"{tensors}: {how}: {len(odd)} differ, by at most {worst:.2g} of their norm ({name})"


def of_rows(step: int, rows: Sequence[RowGradient]) -> Iterator[str]:
    """The rows of a step, each with its share of the gradient; nothing of none."""
    if not rows:
        return
    total = sum(row.share for row in rows)
    yield (
        f"step {step}: {counted(len(rows), 'row')}, each run alone; their losses add up to "
        f"{sum(row.loss for row in rows):.6g}, and their shares of the gradient to {total:.4g}"
    )
    for row in rows[:_ROWS]:
        mean = f"{row.loss / row.weight:.4g} x {row.weight:g}" if row.weight else "none"
        yield f"  {row.share:.1%} of the gradient: {row.place}: loss {mean}, norm {row.norm:.4g}"
        yield f"    {one_line(row.text)}"
    if len(rows) > _ROWS:
        yield f"  and {len(rows) - _ROWS} more"


def of_both(both: Counterfactual) -> Iterator[str]:
    """Steps as they were beside those without some rows."""
    rows, plan = ", ".join(both.rows), both.replay.plan
    if both.steps:
        yield f"without {rows}, of {counted(len(both.steps), 'step')}: {_list(both.steps)}"
    else:
        yield f"without {rows}: steps {plan.first} to {plan.last} do not have it"
    before, without = both.before, both.without
    yield "  step   as it was    without   difference   grad_norm as it was, without"
    for step, loss in before.losses.items():
        other, norms = without.losses[step], (before.norms[step], without.norms[step])
        yield (
            f"{step:6d} {loss:10.6g} {other:10.6g} {other - loss:+12.2e}   "
            f"{norms[0]:.4g}, {norms[1]:.4g}"
        )
    yield "the losses are means over what both have in common"
    for name, value in before.evaluation.items():
        other = without.evaluation[name]
        yield f"  {name} after step {plan.last}: {value:.6g}, {other:.6g}, {other - value:+.2e}"
    if not before.evaluation:
        yield "the run evaluates nothing (data.eval_datasets), so nothing says what is learned"
    yield (
        "both arms have the same state, other rows and random numbers: what differs is what the "
        "rows did to these steps, and not what they do in another order or to a whole run"
    )


def _list(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return ", ".join(map(str, steps[:_SHOWN])) + more


def _nothing(report: ReplayReport) -> str:
    """Why nothing was compared, and with which steps something is."""
    plan = report.plan
    later = sorted(step for step, _ in plan.logged if step > report.reached)
    cure = f"; the next line is of step {later[0]}: add --to {later[0]}" if later else ""
    return (
        "nothing was compared: the run has logged none of these steps, and saved none of their "
        f"checkpoints{cure}"
    )


def _surroundings(report: ReplayReport) -> Iterator[str]:
    launch = report.plan.arms[-1].launch
    if launch is None or not report.are_known:
        yield "the run has not recorded its surroundings (an earlier version wrote it)"
    elif report.differing:
        found = "; ".join(map(str, report.differing))
        yield f"other than in launch {launch.number}, which computed these steps: {found}"
    elif report.num_compared and not report.is_equal:
        yield (
            "nothing that is recorded is other than in the launch that computed these steps; what "
            "a function, a callback or another machine's model does by itself is not recorded"
        )


def of_operations(report: TraceReport) -> Iterator[str]:
    """What two traces have in common, for people."""
    alike = counted(report.num_alike, "operation")
    if report.is_equal:
        yield f"{alike}: equal to the bit"
        return
    if report.parted is not None:
        before, now = (each or "none" for each in report.parted)
        yield f"the operations are others: first {before} then, {now} now"
    if report.first is None:
        yield f"{alike} in both: equal to the bit"
    else:
        number, operation = report.first
        yield f"{alike} in both, {report.num_differing:,} with other bits; the first is {operation}"
        yield f"  number {number:,}; those before it are equal to the bit"
