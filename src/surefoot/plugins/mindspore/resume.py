"""Resume from a checkpoint of MindSpore Transformers: weights, moments, step, learning rate.

Its folder may have any form and strategy: every rank reads its boxes from the slices that contain
them, and nothing is merged. The data order and the random generators are not in the folder, and the
log says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from ...checkpoint.layouts.detection import detect_layout
from ...checkpoint.layouts.layout import AS_STORED, Reading
from ...checkpoint.sources import JoinedSource, TensorSource, read_whole
from ...checkpoint.state.states import local_box_of
from ...data.order.loader import Loader
from ...errors import CheckpointError, counted
from ...model.base_identity import BaseModel
from ...model.weights import places
from ...parallel.sharding import Box
from ...run.foreign_resume import ForeignTrainer, expect_adamw, fill_weights, other_model
from ...training.trainer import Trainer
from .experts import StackedMatrix, StackedSource
from .model import as_huggingface, by_role, open_state
from .opening import LAYOUT, progress_of
from .tensor_layout import MOMENTS

logger = logging.getLogger(__name__)
_SLOTS = dict(zip(MOMENTS, ("exp_avg", "exp_avg_sq"), strict=True))


@dataclass(frozen=True)
class MindSporeProgress:
    """The progress of the training according to its files; None for missing numbers."""

    step_num: int  # windows
    num_updates: int  # of the optimizer; fewer where fp16 overflowed
    batch_size: int | None  # of a window, in all processes
    learning_rate: float | None
    loss_scale: float | None


def load_mindspore_checkpoint(
    folder: Path, trainer: Trainer, *, base: Path, reading: Reading = AS_STORED
) -> None:
    """Load a training of MindSpore Transformers from ``folder`` into ``trainer``, collectively.

    A file in ``rank_0`` selects one of several steps. ``base``, the folder of the recipe's model,
    contains heads and shapes, which the files may lack. If this raises, ``trainer`` is not changed,
    unless the files cannot be read to their end.
    """
    _refuse_unlike(folder, trainer)
    layout = LAYOUT.read_as(reading)
    roles = by_role(open_state(folder, base, layout))
    both = JoinedSource([("", roles["model"]), ("", roles["optimizer"])])
    source = _with_fused_moments(as_huggingface(both, folder, base, layout), trainer)
    progress = read_progress(roles["state"], folder)
    _refuse_other(source, trainer, folder)
    for line in _differences(progress, trainer):
        logger.warning("%s: %s", folder.name, line)

    _fill_together(source, trainer, progress.num_updates)
    if trainer.policy.step.scaler.enabled and progress.loss_scale is not None:
        trainer.policy.step.scaler.load_state_dict({"scale": progress.loss_scale, "calm_steps": 0})
    _take_place(progress, trainer)


def read_progress(state: TensorSource, where: Path) -> MindSporeProgress:
    """The numbers beside the moments. Raises ``CheckpointError`` if they include no step."""
    names, common = state.shapes(), progress_of(where)

    def number(name: str) -> float | None:
        if isinstance(value := common.get(name), int | float):  # common.json, which they believe
            return float(value)
        if name not in names or math.prod(names[name]) != 1:
            return None
        return float(read_whole(state, name).reshape(()).item())

    updates, windows = number("global_step"), number("step_num")
    windows = updates if windows is None else windows
    if windows is None:
        raise CheckpointError(
            f"{where}: contains neither step_num nor global_step, so the step to resume from is "
            f"unknown; to start a new run from its weights, {_from_scratch(where)}"
        )
    batch = number("global_batch_size")
    return MindSporeProgress(
        int(windows),
        int(windows if updates is None else updates),
        int(batch) if batch else None,
        number("learning_rate"),
        number("loss_scale"),
    )


def _from_scratch(folder: Path) -> str:
    return f"remove checkpoint.resume and set model.path={folder}"


def _refuse_unlike(folder: Path, trainer: Trainer) -> None:
    """Reject a method and an optimizer to which MindSpore's moments do not belong."""
    if trainer.policy.weights.is_adapter:
        raise CheckpointError(
            f"{folder}: it contains a full model and its moments, but the recipe's method "
            "trains an adapter; set method to full, or "
            f"{_from_scratch(folder)} to train an adapter of its weights"
        )
    expect_adamw(trainer.policy.step.optimizer, folder)


def _refuse_other(source: TensorSource, trainer: Trainer, folder: Path) -> None:
    """Reject weights of another model, and moments of other parameters."""
    shapes = source.shapes()
    weight_shapes = {name: shape for name, shape in shapes.items() if not name.startswith(MOMENTS)}
    if problem := other_model(weight_shapes, trainer.policy.weights):
        raise CheckpointError(f"{folder}: {problem}")
    for name, parameter in _trainable(trainer):
        for prefix in MOMENTS:
            moment_shape = shapes.get(prefix + name)
            if moment_shape != tuple(parameter.shape):
                moments = (
                    "no moments"
                    if moment_shape is None
                    else f"moments of shape {list(moment_shape)}"
                )
                raise CheckpointError(
                    f"{folder}: contains {moments} of {name}, which is trainable in this run; to "
                    f"start a new run from its weights, {_from_scratch(folder)}"
                )


def _with_fused_moments(source: TensorSource, trainer: Trainer) -> TensorSource:
    """``source``, with the moments of experts fused as parameters are, except in pipelines."""
    if trainer.world.pp > 1:
        return source
    shapes = source.shapes()
    fused_tensors: dict[str, tuple[tuple[int, ...], tuple[StackedMatrix, ...]]] = {}
    for name, at in places(trainer.policy.network.inner).items():
        for prefix in MOMENTS:
            if shapes.get(prefix + name) == at.shape:
                tile = StackedMatrix(
                    prefix + name, Box(at.start, (1, *at.shape)), (0, 0), is_turned=False
                )
                whole, tiles = fused_tensors.get(prefix + at.fused, (at.whole, ()))
                fused_tensors[prefix + at.fused] = whole, (*tiles, tile)
    # A stack with a hole would have whatever memory contains there.
    complete = {
        name: (whole, tiles)
        for name, (whole, tiles) in fused_tensors.items()
        if sum(tile.box.size for tile in tiles) == math.prod(whole)
    }
    return StackedSource(source, complete) if complete else source


def _trainable(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainable parameters of this rank, by their names in the optimizer's state."""
    for group in trainer.policy.step.optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _fill_together(source: TensorSource, trainer: Trainer, num_updates: int) -> None:
    """Raise an error of one rank on all ranks, so that none waits for another."""
    problem = None
    try:
        fill_weights(source, trainer.policy.weights)
        _fill_moments(source, trainer, num_updates)
    except CheckpointError as error:
        problem = str(error)
    if problem := trainer.world.first_of(problem):
        raise CheckpointError(problem)


@torch.no_grad()
def _fill_moments(source: TensorSource, trainer: Trainer, num_updates: int) -> None:
    """Moments sharded like their parameters."""
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in _trainable(trainer):
        moments[name] = {"step": torch.tensor(float(num_updates))}
        for prefix, slot in _SLOTS.items():
            values = torch.zeros_like(parameter, dtype=torch.float32)
            cuts = trainer.policy.optimizer_state.cuts_of(f"{name}.{slot}")
            local_box_of(name, values, cuts).fill(partial(source.read, prefix + name))
            moments[name][slot] = values
    trainer.policy.optimizer_state.load_state_dict(moments)


def _differences(progress: MindSporeProgress, trainer: Trainer) -> Iterator[str]:
    """Differences between the two runs, for the log."""
    if progress.num_updates != progress.step_num:
        updates, steps = (
            counted(n, noun)
            for n, noun in ((progress.num_updates, "update"), (progress.step_num, "step"))
        )
        yield f"the optimizer has made {updates} in {steps}"
    step = _step(progress, trainer.windows.loader)
    peak = trainer.policy.step.optimizer.param_groups[0]["lr"]
    now, was = peak * trainer.policy.step.schedule.factor(step), progress.learning_rate
    # Theirs is a float32, which has seven digits.
    if was and not any(math.isclose(was, rate, rel_tol=1e-5) for rate in (peak, now)):
        yield f"its learning rate is {was:.4g}; the next one here is {now:.4g}, of at most {peak:g}"


def _step(progress: MindSporeProgress, loader: Loader) -> int:
    """The step of this run after the same number of examples, as MindSpore counts them."""
    if progress.batch_size is None:
        return progress.step_num
    return progress.step_num * progress.batch_size // loader.global_batch_size


def _take_place(progress: MindSporeProgress, trainer: Trainer) -> None:
    """Go to the window of the step, in Surefoot's data order. If the length of an epoch is
    unknown, all steps count as the first epoch.
    """
    loader, step = trainer.windows.loader, _step(progress, trainer.windows.loader)
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


class MindSporeTransformers(ForeignTrainer):
    """MindSpore Transformers."""

    title: ClassVar[str] = "MindSpore Transformers"
    needs_base: ClassVar[bool] = False

    def recognise(self, folder: Path) -> bool:
        """Whether it is a folder of MindSpore."""
        return detect_layout(folder) == LAYOUT

    def check_weights(self, folder: Path, base: BaseModel) -> None:
        """Open every slice, whose strategy may be wrong or unknown."""
        open_state(folder, base.folder, LAYOUT.read_as(base.section.reading))

    def load(self, folder: Path, trainer: Trainer, *, base: BaseModel, trust_pickle: bool) -> None:
        """``base`` tells heads and shapes; there are no pickles."""
        reading = base.section.reading
        load_mindspore_checkpoint(folder, trainer, base=base.folder, reading=reading)


TRAINER = MindSporeTransformers()
