"""Resume from a checkpoint of Hugging Face's Trainer: its weights, moments and progress.

Everything is read and checked before the run is changed. The Trainer's data order is not in its
checkpoints, and the log says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...checkpoint.state.roles import Stateful
from ...data.order.loader import Loader
from ...errors import CheckpointError, RecipeError, counted
from ...run.foreign_resume import ForeignTrainer, expect_adamw, fill_weights
from ...storage import files
from ...training.callbacks.early_stop import EarlyStop
from ...training.trainer import Trainer
from .moments import Moments, moments_by_name, trainer_groups
from .pickles import read_pickle
from .same_model import open_same
from .trainer_folder import (
    OPTIMIZER,
    RANDOM,
    SCALER,
    SCHEDULER,
    TrainerProgress,
    is_trainer_checkpoint,
    latest_complete,
    pickles_in,
    read_progress,
    refuse_incomplete,
)

logger = logging.getLogger(__name__)
HYPERPARAMETERS = {"betas": "beta1, beta2", "eps": "epsilon", "weight_decay": "weight_decay"}


def load_trainer_checkpoint(folder: Path, trainer: Trainer, *, trust_pickle: bool) -> None:
    """Load the Trainer's checkpoint ``folder``, of a model or a PEFT adapter, into ``trainer``.

    Raises ``CheckpointError``, and ``trainer`` is not changed, for untrusted pickles, missing or
    damaged files, and another model, method or optimizer.
    """
    progress = check_trainer_checkpoint(folder, trust_pickle=trust_pickle)
    policy = trainer.policy.module
    source = open_same(folder, policy, trainer.policy.weights)
    saved = read_pickle(folder / OPTIMIZER)
    moments = _moments(folder, trainer, moments_by_name(saved, policy, folder / OPTIMIZER))
    scheduler, scaler, random = (
        read_pickle(folder / name) if files.exists(folder / name) else None
        for name in (SCHEDULER, SCALER, RANDOM)
    )
    scale = _scale(scaler, folder / SCALER)
    for line in _differences(saved, scheduler, progress, moments, trainer):
        logger.warning("%s: %s", folder.name, line)
    if random is not None:
        _take_random(random, folder / RANDOM, trainer.states["random"])

    fill_weights(source, trainer.policy.weights)
    trainer.policy.optimizer_state.load_state_dict(moments)
    if scale is not None:
        trainer.policy.step.scaler.load_state_dict(scale)
    _take_progress(progress, trainer)
    _take_place(progress, trainer.windows.loader)


def check_trainer_checkpoint(folder: Path, *, trust_pickle: bool) -> TrainerProgress:
    """Reject problems that show without a model; errors as ``load_trainer_checkpoint``."""
    refuse_incomplete(folder)
    if not trust_pickle:
        raise CheckpointError(_refusal(folder))
    return read_progress(folder)


def _refusal(folder: Path) -> str:
    names = pickles_in(folder)
    listed = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
    them = "are pickles" if len(names) > 1 else "is a pickle"
    return (
        f"{folder}: a checkpoint of the Hugging Face Trainer. Its {listed} {them}, which can run "
        "code when read. If you trust whoever wrote it, add --trust-pickle (from Python: "
        "trust_pickle=True); tensors and plain values alone are then read, and anything else is "
        "an error"
    )


def _moments(folder: Path, trainer: Trainer, by_module: Moments) -> Moments:
    """The same moments under the names of Surefoot's optimizer state."""
    optimizer = trainer.policy.step.optimizer
    expect_adamw(optimizer, folder / OPTIMIZER)
    names = {id(p): name for name, p in trainer.policy.module.named_parameters()}
    return {
        ours: by_module[names[id(parameter)]]
        for group in optimizer.param_groups
        for ours, parameter in zip(group["names"], group["params"], strict=True)
    }


def _differences(
    saved: Any, scheduler: object, progress: TrainerProgress, moments: Moments, trainer: Trainer
) -> Iterator[str]:
    """Differences between the two runs, for the log."""
    step = progress.global_step
    updates = max(int(values["step"]) for values in moments.values())
    made = counted(updates, "update")
    if updates > step:
        raise CheckpointError(
            f"{OPTIMIZER} has made {made}, but trainer_state.json is of step {step}: "
            "two saves are mixed in this folder; resume from another checkpoint"
        )
    if updates < step:
        yield f"{OPTIMIZER} has made {made} in {counted(step, 'step')}"
    last = scheduler.get("last_epoch") if isinstance(scheduler, Mapping) else None
    if isinstance(last, int) and last != step:
        yield (
            f"{SCHEDULER} is at step {last}, trainer_state.json at {step}; the learning rate "
            f"continues from step {step}"
        )
    if progress.max_steps not in (0, trainer.state.max_steps):
        yield (
            f"the Trainer was to make {counted(progress.max_steps, 'step')}, this run makes "
            f"{trainer.state.max_steps:,}"
        )
    yield from _other_settings(saved["param_groups"], scheduler, step, trainer)


def _other_settings(
    theirs: Sequence[Mapping[str, Any]], scheduler: object, step: int, trainer: Trainer
) -> Iterator[str]:
    ours = trainer.policy.step.optimizer.param_groups
    for key, name in HYPERPARAMETERS.items():
        was, now = theirs[0].get(key), ours[0][key]
        has_none = key == "weight_decay" and not now and len(ours) == 1  # vectors alone learn
        if _numbers(was) not in (None, _numbers(now)) and not has_none:
            yield f"optim.adamw.{name} was {was} and is {now} now"
    if ours[0]["weight_decay"]:
        decay = trainer_groups(trainer.policy.module)[0]
        names = {id(p): name for name, p in trainer.policy.module.named_parameters()}
        here = {names[id(p)] for g in ours if g["weight_decay"] for p in g["params"]}
        if odd := sorted(here ^ set(decay)):
            yield (
                f"weight decay: {counted(len(odd), 'parameter differs', 'parameters differ')} from "
                f"the Trainer's, for example {odd[0]}"
            )
    rates = scheduler.get("_last_lr") if isinstance(scheduler, Mapping) else None
    if isinstance(rates, list) and rates and isinstance(rates[0], float):
        rate = ours[0]["lr"] * trainer.policy.step.schedule.factor(step)
        if not math.isclose(rate, rates[0], rel_tol=1e-6, abs_tol=1e-12):
            yield f"the Trainer's next learning rate was {rates[0]:.4g}; it is {rate:.4g} now"


def _numbers(value: object) -> tuple[object, ...] | None:
    """The numbers of a setting, to compare; None if it is something else."""
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    return found if all(type(number) in (int, float) for number in found) else None


def _scale(saved: object, where: Path) -> dict[str, float] | None:
    """torch's GradScaler as Surefoot's: both multiply the mean loss of a step."""
    if not saved:
        return None
    scale = saved.get("scale") if isinstance(saved, Mapping) else None
    calm = saved.get("_growth_tracker", 0) if isinstance(saved, Mapping) else 0
    if not isinstance(scale, int | float) or not 0 < scale < 1e30 or not isinstance(calm, int):
        raise CheckpointError(f"{where}: it is not the state of torch's GradScaler")
    return {"scale": float(scale), "calm_steps": calm}


def _take_random(saved: Any, where: Path, generators: Stateful) -> None:
    """Set the generators, for code that draws between steps; inside a step, the seed counts."""
    try:
        version, words, gauss = saved["python"]
        name, key, position, has_gauss, cached = saved["numpy"]
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "numpy": {
                "bit_generator": name,
                "state": {"key": torch.from_numpy(key.astype("int64")), "pos": int(position)},
                "has_gauss": has_gauss,
                "gauss": cached,
            },
            "torch": saved["cpu"],
        }
        if isinstance(saved.get("cuda"), torch.Tensor):  # a list is of several GPUs
            state["cuda"] = saved["cuda"]
        generators.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        raise CheckpointError(
            f"{where}: it does not contain the generators of a process; delete the file to "
            "resume without them"
        ) from None


def _take_progress(progress: TrainerProgress, trainer: Trainer) -> None:
    state = trainer.state
    best = progress.best_global_step
    if best is not None and trainer.section.load_best_model_at_end:
        logger.info(
            "the best checkpoint, step %d of the Trainer's run, cannot be loaded at the end; "
            "the best metric starts again with this run",
            best,
        )
    keeps = best is not None and not trainer.section.load_best_model_at_end
    state.load_state_dict(
        {
            "global_step": progress.global_step,
            "epoch": progress.epoch,
            "best_metric": progress.best_metric if keeps else None,
            "best_global_step": best if keeps else None,
            "num_input_tokens_seen": progress.num_input_tokens_seen,
            "total_flos": progress.total_flos,
            "log_history": progress.log_history,
            "train_loss_total": progress.train_loss_total,
            "train_runtime": 0.0,
        }
    )
    if progress.num_worse is not None:
        counted = {"best": progress.best_metric, "num_worse": progress.num_worse}
        trainer.callbacks.load_state_dict({EarlyStop.__name__: counted})


def _take_place(progress: TrainerProgress, loader: Loader) -> None:
    """Go to the window of the step; by the share of the epoch if batch sizes differ. If the
    length of an epoch is unknown, all steps count as the first epoch.
    """
    windows = loader.steps_per_epoch
    epoch, window = divmod(progress.global_step, windows) if windows else (0, progress.global_step)
    if windows and abs(progress.global_step / windows - progress.epoch) > 1 / windows:
        epoch, window = divmod(round(progress.epoch * windows), windows)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "window": window})
    logger.info(
        "the data resumes in epoch %d after %d of its %s examples; their order is %s",
        epoch + 1,
        window * loader.global_batch_size,
        loader.num_examples or "many",
        "Surefoot's; the Trainer's order is not in its checkpoints"
        if loader.shuffle
        else "as stored",
    )


class HuggingFaceTrainer(ForeignTrainer):
    """The Trainer of transformers."""

    title: ClassVar[str] = "the Hugging Face Trainer"
    needs_base: ClassVar[bool] = True

    def recognise(self, folder: Path) -> bool:
        """Whether it wrote ``folder``, complete or not."""
        return is_trainer_checkpoint(folder)

    def latest_in(self, run: Path) -> Path | None:
        """The latest one whose save was not interrupted."""
        return latest_complete(run)

    def pickles_in(self, folder: Path) -> list[str]:
        """Those of the optimizer and its like."""
        return pickles_in(folder)

    def check(self, folder: Path, *, trust_pickle: bool, pp: int) -> None:
        """Raises ``RecipeError`` for a pipeline, ``CheckpointError`` for pickles not trusted."""
        if pp > 1:
            raise RecipeError(
                f"parallel.pp: a pipeline cannot resume from {folder}, which another trainer "
                "wrote; start with pp 1, save, and resume from that checkpoint with any pp"
            )
        check_trainer_checkpoint(folder, trust_pickle=trust_pickle)

    def load(self, folder: Path, trainer: Trainer, *, base: Path, trust_pickle: bool) -> None:
        """The model around an adapter is not needed."""
        load_trainer_checkpoint(folder, trainer, trust_pickle=trust_pickle)


TRAINER = HuggingFaceTrainer()
