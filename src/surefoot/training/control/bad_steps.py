"""Steps whose loss or gradient is NaN or infinite: warnings, and the error that ends the run."""

from __future__ import annotations

import logging
from pathlib import Path

from ...errors import RunError, counted
from ..section import TrainSection
from ..step import StepMetrics

logger = logging.getLogger(__name__)
NUM_ZERO = 10  # steps without a gradient, before a run that samples warns
MAX_ROLLBACKS = 3  # to one checkpoint: more bad windows than that are no accident


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
    found = newest or "no checkpoint has been saved yet"
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
        f"{found}. Lower the learning rate (optim), inspect the data of that step, or "
        f"{ways[section.on_nan]}"
    )
