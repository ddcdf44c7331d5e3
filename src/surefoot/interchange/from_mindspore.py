"""Go on where a training of MindSpore Transformers stopped: weights, moments, step, learning rate.

Its folder may be of any form and strategy: every process reads the boxes that it holds from the
slices they lie in, and nothing is merged. What is not in the folder, the order of the data and the
random generators, is said in the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..checkpoint.mindspore.experts import StackedMatrix, StackedSource
from ..checkpoint.mindspore.opened import progress_of
from ..checkpoint.mindspore.parallel import MOMENTS
from ..checkpoint.mindspore.theirs import MindSporeHints, as_huggingface, by_role, open_state
from ..checkpoint.sources.joined import JoinedSource
from ..checkpoint.sources.source import TensorSource, read_whole
from ..checkpoint.state.local_box import local_box_of
from ..checkpoint.state.states import Stateful, cuts_of
from ..checkpoint.weights import detect_layout
from ..data.order.loader import Loader
from ..errors import CheckpointError
from ..geometry.box import Box
from ..model.fused_parameters import places
from ..model.pretrained.weights import AdapterWeights, FullWeights
from ..training.trainer import Trainer

logger = logging.getLogger(__name__)
_SLOTS = dict(zip(MOMENTS, ("exp_avg", "exp_avg_sq"), strict=True))


@dataclass(frozen=True)
class Progress:
    """How far the training was, as its files say it; None for what they do not."""

    step_num: int  # windows
    num_updates: int  # of the optimizer; fewer where fp16 overflowed
    batch_size: int | None  # of a window, in all processes
    learning_rate: float | None
    loss_scale: float | None


def load_mindspore_checkpoint(folder: Path, trainer: Trainer, *, base: Path) -> None:
    """Make ``trainer`` what a training of MindSpore Transformers was when it saved ``folder``.

    Args:
        folder: of any form; a file in ``rank_0`` names one of several steps.
        trainer: built from the recipe; of several processes each calls this. Nothing of it changes
            if this raises, unless the files cannot be read to their end.
        base: the folder of the recipe's model, which tells what the files may not: heads, shapes.

    Raises:
        CheckpointError: files that do not belong together, no moments, another model, a method
            that trains an adapter, or an optimizer other than AdamW.
    """
    _refuse_unlike(folder, trainer)
    is_whole = detect_layout(base) == "huggingface"
    theirs = MindSporeHints(base=base if is_whole else None)
    roles = by_role(open_state(folder, theirs))
    both = JoinedSource([("", roles["model"]), ("", roles["optimizer"])])
    source = _with_fused_moments(as_huggingface(both, folder, theirs), trainer)
    progress = read_progress(roles["state"], folder)
    _refuse_other(source, trainer, folder)
    for line in _differences(progress, trainer):
        logger.warning("%s: %s", folder.name, line)

    _fill_together(source, trainer, progress.num_updates)
    if trainer.step.scaler.enabled and progress.loss_scale is not None:
        trainer.step.scaler.load_state_dict({"scale": progress.loss_scale, "calm_steps": 0})
    _take_place(progress, trainer)


def read_progress(state: TensorSource, where: Path) -> Progress:
    """The numbers beside the moments. Raises ``CheckpointError`` if no step is among them."""
    names, told = state.shapes(), progress_of(where)

    def number(name: str) -> float | None:
        if isinstance(said := told.get(name), int | float):  # common.json, which they believe
            return float(said)
        if name not in names or math.prod(names[name]) != 1:
            return None
        return float(read_whole(state, name).reshape(()).item())

    updates, windows = number("global_step"), number("step_num")
    windows = updates if windows is None else windows
    if windows is None:
        raise CheckpointError(
            f"{where}: says neither step_num nor global_step, so there is no step to go on from; "
            f"to start anew from its weights, {_anew(where)}"
        )
    batch = number("global_batch_size")
    return Progress(
        int(windows),
        int(windows if updates is None else updates),
        int(batch) if batch else None,
        number("learning_rate"),
        number("loss_scale"),
    )


def _anew(folder: Path) -> str:
    return f"leave checkpoint.resume out and set model.path={folder}"


def _refuse_unlike(folder: Path, trainer: Trainer) -> None:
    """Refuse a method and an optimizer that MindSpore's moments do not belong to."""
    if isinstance(trainer.weights, AdapterWeights):
        raise CheckpointError(
            f"{folder}: it holds a whole model and its moments, but the recipe's method trains an "
            f"adapter; set method to full, or {_anew(folder)} to train an adapter of its weights"
        )
    if not isinstance(trainer.step.optimizer, torch.optim.AdamW):
        raise CheckpointError(
            f"{folder}: it holds AdamW's moments, but the recipe's optimizer is "
            f"{type(trainer.step.optimizer).__name__}; set optim to adamw"
        )


def _refuse_other(source: TensorSource, trainer: Trainer, folder: Path) -> None:
    """Refuse weights of another model, and moments of other parameters."""
    shapes = source.shapes()
    theirs = {name: shape for name, shape in shapes.items() if not name.startswith(MOMENTS)}
    ours = {name: tuple(t.shape) for name, t in trainer.weights.state_dict().items()}
    odd = sorted(ours.keys() ^ theirs.keys()) or [n for n in ours if ours[n] != theirs[n]]
    if odd:
        here, there = (_shape(found.get(odd[0])) for found in (ours, theirs))
        raise CheckpointError(
            f"{folder}: it is the checkpoint of another model: {len(odd)} tensors differ; "
            f"{odd[0]} is {there} in it, {here} in this run"
        )
    for name, parameter in _learning(trainer):
        for prefix in MOMENTS:
            found = shapes.get(prefix + name)
            if found != tuple(parameter.shape):
                what = "no moments" if found is None else f"moments of shape {list(found)}"
                raise CheckpointError(
                    f"{folder}: holds {what} of {name}, which learns in this run; to start anew "
                    f"from its weights, {_anew(folder)}"
                )


def _with_fused_moments(source: TensorSource, trainer: Trainer) -> TensorSource:
    """``source``, with the moments of experts laid together as their parameters lie in memory. What
    learns in the stages of a pipeline has other names, and is left as it is."""
    weights = trainer.weights
    if not isinstance(weights, FullWeights) or trainer.world.pp > 1:
        return source
    shapes = source.shapes()
    made: dict[str, tuple[tuple[int, ...], tuple[StackedMatrix, ...]]] = {}
    for name, at in places(weights.model).items():
        for prefix in MOMENTS:
            if shapes.get(prefix + name) == at.shape:
                tile = StackedMatrix(
                    prefix + name, Box(at.start, (1, *at.shape)), (0, 0), is_turned=False
                )
                whole, tiles = made.get(prefix + at.fused, (at.whole, ()))
                made[prefix + at.fused] = whole, (*tiles, tile)
    complete = {
        name: (whole, tiles)
        for name, (whole, tiles) in made.items()
        if sum(tile.box.size for tile in tiles) == math.prod(whole)
    }
    return StackedSource(source, complete) if complete else source


def _shape(found: tuple[int, ...] | None) -> str:
    return "not there" if found is None else f"of shape {list(found)}"


def _learning(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that learn in this process, by their names in the optimizer's state."""
    for group in trainer.step.optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _fill_together(source: TensorSource, trainer: Trainer, num_updates: int) -> None:
    """An error in one process is one in all, so that none waits for another."""
    problem = None
    try:
        _fill_weights(source, trainer.weights)
        _fill_moments(source, trainer, num_updates)
    except CheckpointError as error:
        problem = str(error)
    if problem := trainer.world.first_of(problem):
        raise CheckpointError(problem)


@torch.no_grad()
def _fill_weights(source: TensorSource, weights: Stateful) -> None:
    """Box by box into the tensors that are there, so that no second model is in memory."""
    current = weights.state_dict()
    for name, tensor in current.items():
        local_box_of(name, tensor, cuts_of(weights, name)).fill(partial(source.read, name))
    weights.load_state_dict(current)


@torch.no_grad()
def _fill_moments(source: TensorSource, trainer: Trainer, num_updates: int) -> None:
    """Moments cut as their parameters are."""
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in _learning(trainer):
        moments[name] = {"step": torch.tensor(float(num_updates))}
        for prefix, slot in _SLOTS.items():
            found = torch.zeros_like(parameter, dtype=torch.float32)
            cuts = cuts_of(trainer.optimizer_state, f"{name}.{slot}")
            local_box_of(name, found, cuts).fill(partial(source.read, prefix + name))
            moments[name][slot] = found
    trainer.optimizer_state.load_state_dict(moments)


def _differences(progress: Progress, trainer: Trainer) -> Iterator[str]:
    """What goes on otherwise than it was."""
    if progress.num_updates != progress.step_num:
        yield f"the optimizer has made {progress.num_updates} updates in {progress.step_num} steps"
    step = _step(progress, trainer.loader)
    peak = trainer.step.optimizer.param_groups[0]["lr"]
    now, was = peak * trainer.step.schedule.factor(step), progress.learning_rate
    if was and not any(math.isclose(was, rate, rel_tol=1e-5) for rate in (peak, now)):
        yield f"its learning rate is {was:.4g}; the next one here is {now:.4g}, of at most {peak:g}"


def _step(progress: Progress, loader: Loader) -> int:
    """The step of this run after as many examples, as MindSpore Transformers counts it."""
    if progress.batch_size is None:
        return progress.step_num
    return progress.step_num * progress.batch_size // loader.global_batch_size


def _take_place(progress: Progress, trainer: Trainer) -> None:
    """Go to the window of the step, in our order of the data. Where nobody knows how long an epoch
    is, the steps were all in the first."""
    loader, step = trainer.loader, _step(progress, trainer.loader)
    if step != progress.step_num:
        logger.info(
            "MindSpore's step %d with %d examples per step is step %d with %d examples per step",
            *(progress.step_num, progress.batch_size, step, loader.global_batch_size),
        )
    windows = loader.steps_per_epoch
    epoch, window = divmod(step, windows) if windows else (0, step)
    taken: Mapping[str, object] = {
        "global_step": step,
        "epoch": step / windows if windows else 0.0,
        "num_skipped_steps": 0,
    }
    trainer.state.load_state_dict(taken)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "window": window})
    logger.info(
        "the data resumes in epoch %d after %d of its %s examples, in Surefoot's order%s; "
        "MindSpore's folders contain neither their order nor random generators nor AdamW's "
        "settings",
        epoch + 1,
        window * loader.global_batch_size,
        loader.num_examples or "many",
        "" if loader.shuffle else " (as stored)",
    )
