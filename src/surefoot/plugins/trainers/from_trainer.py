"""Resume from a checkpoint of Hugging Face's Trainer: its weights, moments and progress.

Everything is read and checked before the run is changed. The Trainer's data order is not in its
checkpoints, and the log says so. Its random generators are not read: here dropout and sampling
follow from the seed and the step.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.commit import named, step_of
from ...checkpoint.disk.folder import ADAPTER, ADAPTER_CONFIG, MODEL, number
from ...checkpoint.layouts.adapter_merge import CHANGED_BASE
from ...checkpoint.layouts.detection import detect_layout
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources import TensorSource, read_whole
from ...data.order.loader import Loader
from ...errors import CheckpointError, RecipeError, counted
from ...model.base_identity import BaseModel
from ...model.weights import adapter_files
from ...network.method import Weights
from ...run.foreign_resume import ForeignTrainer, expect_adamw, fill_weights, other_model
from ...storage import files
from ...training.trainer import Trainer
from .pickles import read_pickle
from .trainer_folder import (
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    STATE,
    TrainerProgress,
    is_trainer_checkpoint,
    moments_by_name,
    pickles_in,
    read_progress,
    refuse_incomplete,
    trainer_groups,
)

logger = logging.getLogger(__name__)
_BAD = "num_bad_epochs"  # torch's ReduceLROnPlateau alone has it
_HYPERPARAMETERS = {"betas": "beta1, beta2", "eps": "epsilon", "weight_decay": "weight_decay"}
# Settings of an adapter that change what its weights mean; targets and rank show in its tensors.
_MEANING = (
    *("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "bias"),
    *("fan_in_fan_out", "layer_replication", "lora_bias", "alora_invocation_tokens", "use_qalora"),
)
_IN_A_RECIPE = {"lora_alpha": ".alpha", "use_rslora": ".rslora", "use_dora": ".dora"}
_SHAPING = ("r", "rank_pattern", "target_modules", "target_parameters", "modules_to_save")


class HuggingFaceTrainer(ForeignTrainer):
    """The Trainer of transformers."""

    title: ClassVar[str] = "the Hugging Face Trainer"
    needs_base: ClassVar[bool] = True

    def recognise(self, folder: Path) -> bool:
        """Whether it wrote ``folder``, complete or not."""
        return is_trainer_checkpoint(folder)

    def latest_in(self, run: Path) -> Path | None:
        """The latest one whose save was not interrupted."""
        checkpoints = (path for path in named(run) if is_trainer_checkpoint(path))
        return max((p for p in checkpoints if files.exists(p / STATE)), key=step_of, default=None)

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
        _check(folder, trust_pickle=trust_pickle)

    def load(self, folder: Path, trainer: Trainer, *, base: BaseModel, trust_pickle: bool) -> None:
        """The model around an adapter is not needed."""
        load_trainer_checkpoint(folder, trainer, trust_pickle=trust_pickle)


TRAINER = HuggingFaceTrainer()


def load_trainer_checkpoint(folder: Path, trainer: Trainer, *, trust_pickle: bool) -> None:
    """Load the Trainer's checkpoint ``folder``, of a model or a PEFT adapter, into ``trainer``.

    Raises ``CheckpointError``, and ``trainer`` is not changed, for untrusted pickles, missing or
    damaged files, and another model, method or optimizer.
    """
    progress, policy = _check(folder, trust_pickle=trust_pickle), trainer.policy
    source = _open_same(folder, policy.module, policy.weights)
    saved: Any = read_pickle(folder / OPTIMIZER)
    by_module = moments_by_name(saved, policy.module, folder / OPTIMIZER)
    expect_adamw(policy.step.optimizer, folder / OPTIMIZER)
    num_updates = max(int(values["step"]) for values in by_module.values())
    # Fewer is possible, since an overflow of fp16 skips an update; more is not.
    if num_updates > progress.global_step:
        raise CheckpointError(
            f"{folder}: {OPTIMIZER} has made {counted(num_updates, 'update')}, but "
            f"trainer_state.json is of step {progress.global_step}: two saves are mixed in this "
            "folder; resume from another checkpoint"
        )
    names = {id(p): name for name, p in policy.module.named_parameters()}
    moments = {
        name_here: by_module[names[id(parameter)]]
        for group in policy.step.optimizer.param_groups
        for name_here, parameter in zip(group["names"], group["params"], strict=True)
    }
    scheduler, scaler = (
        read_pickle(folder / name) if files.exists(folder / name) else None
        for name in (SCHEDULER, SCALER)
    )
    scale = _scale(scaler, folder / SCALER)
    _take_reductions(scheduler, trainer)
    for line in _differences(saved, scheduler, progress, num_updates, trainer):
        logger.warning("%s: %s", folder.name, line)
    fill_weights(source, policy.weights)
    policy.optimizer_state.load_state_dict(moments)
    if scale is not None:
        policy.step.scaler.load_state_dict(scale)
    _take_progress(progress, trainer)
    _take_place(progress, trainer.windows.loader)


def _check(folder: Path, *, trust_pickle: bool) -> TrainerProgress:
    """Reject problems that show without a model; errors as ``load_trainer_checkpoint``."""
    refuse_incomplete(folder)
    if not trust_pickle:
        *first, last = pickles_in(folder)
        listed = f"{', '.join(first)} and {last} are pickles" if first else f"{last} is a pickle"
        raise CheckpointError(
            f"{folder}: a checkpoint of the Hugging Face Trainer. Its {listed}, which can run "
            "code when read. If you trust whoever wrote it, add --trust-pickle (from Python: "
            "trust_pickle=True); tensors and plain values alone are then read, and anything else "
            "is an error"
        )
    return read_progress(folder)


def _differences(
    saved: Any, scheduler: object, progress: TrainerProgress, num_updates: int, trainer: Trainer
) -> Iterator[str]:
    """Differences between the two runs that the user may want, for the log."""
    step = progress.global_step
    if num_updates < step:  # steps whose fp16 gradients overflowed
        yield f"{OPTIMIZER} has made {counted(num_updates, 'update')} in {counted(step, 'step')}"
    schedule = scheduler if isinstance(scheduler, Mapping) else {}
    last, rates = schedule.get("last_epoch"), schedule.get("_last_lr")
    if isinstance(last, int) and last != step and _BAD not in schedule:  # that counts evaluations
        yield (
            f"{SCHEDULER} is at step {last}, trainer_state.json at {step}; the learning rate "
            f"continues from step {step}"
        )
    if progress.max_steps not in (0, trainer.state.max_steps):
        yield (
            f"the Trainer was to make {counted(progress.max_steps, 'step')}, this run makes "
            f"{trainer.state.max_steps:,}"
        )
    groups, policy = trainer.policy.step.optimizer.param_groups, trainer.policy
    for key, name in _HYPERPARAMETERS.items():
        was, now = saved["param_groups"][0].get(key), groups[0][key]
        # with one group, vectors alone are trained
        has_none = key == "weight_decay" and not now and len(groups) == 1
        if _numbers(was) not in (None, _numbers(now)) and not has_none:
            yield f"optim.adamw.{name} was {was} and is {now} now"
    if groups[0]["weight_decay"]:
        names = {id(p): name for name, p in policy.module.named_parameters()}
        decays = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
        if odd := sorted(decays ^ set(trainer_groups(policy.module)[0])):
            yield (
                f"weight decay: {counted(len(odd), 'parameter differs', 'parameters differ')} from "
                f"the Trainer's, for example {odd[0]}"
            )
    if isinstance(rates, list) and rates and isinstance(rates[0], float):
        rate = groups[0]["lr"] * policy.step.schedule.factor(step)
        if not math.isclose(rate, rates[0], rel_tol=1e-6, abs_tol=1e-12):
            yield f"the Trainer's next learning rate was {rates[0]:.4g}; it is {rate:.4g} now"


def _take_reductions(saved: object, trainer: Trainer) -> None:
    """The state of torch's ReduceLROnPlateau, if this run has that schedule, too."""
    schedule = trainer.policy.step.schedule
    if schedule.plateau is None or not isinstance(saved, Mapping) or _BAD not in saved:
        return
    best, bad, cooldown = (number(saved.get(n)) for n in ("best", _BAD, "cooldown_counter"))
    rates = saved.get("_last_lr")
    rate = number(rates[0]) if isinstance(rates, list) and rates else None
    schedule.reductions.load_state_dict(
        {
            "factor": 1.0 if rate is None else min(1.0, rate / schedule.peak),
            "metric": trainer.section.metric_for_best_model,
            "best": best if best is not None and math.isfinite(best) else None,
            "num_bad": int(bad or 0),
            "cooldown": int(cooldown or 0),
        }
    )


def _numbers(value: object) -> tuple[object, ...] | None:
    """The numbers of a setting, to compare; None if it is something else."""
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    # Not isinstance, by which True is a number.
    return numbers if all(type(number) in (int, float) for number in numbers) else None


def _scale(saved: object, where: Path) -> dict[str, float] | None:
    """torch's GradScaler as Surefoot's: both multiply the mean loss of a step."""
    if not saved:
        return None
    scale = saved.get("scale") if isinstance(saved, Mapping) else None
    calm = saved.get("_growth_tracker", 0) if isinstance(saved, Mapping) else 0
    # The bounds refuse NaN and infinity, too.
    if not isinstance(scale, int | float) or not 0 < scale < 1e30 or not isinstance(calm, int):
        raise CheckpointError(f"{where}: it is not the state of torch's GradScaler")
    return {"scale": float(scale), "calm_steps": calm}


def _take_progress(progress: TrainerProgress, trainer: Trainer) -> None:
    trainer.state.load_state_dict(
        {
            "global_step": progress.global_step,
            "epoch": progress.epoch,
            "best_metric": progress.best_metric,  # by another metric, perhaps: it is settled after
            "best_global_step": progress.best_global_step,
            "num_input_tokens_seen": progress.num_input_tokens_seen,
            "total_flos": progress.total_flos,
            "log_history": progress.log_history,
            "train_loss_total": progress.train_loss_total,
            "train_runtime": 0.0,
            "reductions": trainer.state.reductions.state_dict(),  # of the scheduler's file
        }
    )


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


# The weights


def _open_same(folder: Path, policy: nn.Module, weights: Weights) -> TensorSource:
    """The weights in ``folder``, of a Hugging Face model or a PEFT adapter.

    Raises ``CheckpointError`` if their names, shapes or adapter settings are not those of
    ``policy``, the model being trained, and its ``weights``.
    """
    layout = detect_layout(folder)
    if layout is None and not any(folder.glob("*_model*.bin")):  # pickles: open_folder names a cure
        raise CheckpointError(
            f"{folder}: it contains no weights ({MODEL} or {ADAPTER}); resume from another "
            "checkpoint"
        )
    if layout is not None and layout.is_adapter != weights.is_adapter:
        saved, trained = ("an adapter", "a full model")[:: 1 if layout.is_adapter else -1]
        raise CheckpointError(
            f"{folder}: it contains {saved}, but the recipe's method trains {trained}; "
            f"set method to {'lora' if layout.is_adapter else 'full'}"
        )
    if weights.is_adapter and weights.is_converted:
        raise CheckpointError(
            f"{folder}: it contains one adapter, but this run has frozen ones beside it "
            "(model.frozen_adapters, method.lora.init); leave them out, or start a new run from it "
            f"with model.adapter={folder}"
        )
    source = open_folder(folder)
    shapes = source.shapes()
    if not weights.is_adapter:
        if problem := other_model(shapes, weights):
            raise CheckpointError(f"{folder}: {problem}")
        return source
    with files.raising(CheckpointError):
        stored = strict_json.read_object(folder / ADAPTER_CONFIG)
    current: dict[str, Any] = json.loads(adapter_files(policy)[ADAPTER_CONFIG])
    _refuse_other_meaning(folder, stored, current)
    names = weights.state_dict().keys()
    shapes = {n: s for n, s in shapes.items() if n in names or not _is_base(source, n, policy)}
    if problem := other_model(shapes, weights):
        pairs = [(name, _sorted(stored.get(name)), _sorted(current.get(name))) for name in _SHAPING]
        odd = [f"{name} {was} in it, {now} here" for name, was, now in pairs if was != now]
        reason = "; ".join(odd) or f"its {ADAPTER_CONFIG} is the same"
        raise CheckpointError(f"{folder}: {problem} ({reason})")
    return source


def _is_base(source: TensorSource, name: str, policy: nn.Module) -> bool:
    """Whether it is the base's: PEFT adds embeddings that are a target or were resized."""
    tensor = policy.state_dict().get(name)
    if tensor is None or tuple(tensor.shape) != source.shapes()[name]:
        return False
    # By value: name and shape are the same in both cases.
    return torch.equal(read_whole(source, name).to(tensor.dtype), tensor.cpu())


def _refuse_other_meaning(folder: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Reject an adapter with equal tensors but other settings."""
    where = folder / ADAPTER_CONFIG
    # Versions of PEFT differ in how they write what is unset.
    unset: tuple[object, ...] = (None, False, "none", {}, [])
    for name in _MEANING:
        was, now = stored.get(name), current.get(name)
        if was != now and not (was in unset and now in unset):
            raise CheckpointError(
                f"{where}: {name} is {was} in it and {now} in this run; set "
                f"method.lora{_IN_A_RECIPE.get(name, '')} to the checkpoint's value, or start a "
                f"new run from it with model.adapter={folder}"
            )
    init = str(stored.get("init_lora_weights")).lower()
    if init.startswith(CHANGED_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {init} changed the base at the start of training, so "
            "its moments belong to that base only; this run's base is the original model"
        )
    base, here = str(stored.get("base_model_name_or_path")), str(current["base_model_name_or_path"])
    # The last part only: the same base may lie in another folder, or in a cache.
    if Path(base).name not in here:
        logger.warning(
            "%s: the adapter was trained on %s, this run's base is %s", where, base, here
        )
    was, now = stored.get("lora_dropout"), current["lora_dropout"]
    if was != now:
        logger.warning("%s: lora_dropout was %s and is %s now", where, was, now)


def _sorted(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, list) else value
