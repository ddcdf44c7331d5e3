"""Hugging Face's Trainer with Surefoot checkpoints: asynchronous, atomic, verified.

The Trainer resumes by itself from the folder it is given, as far as it finds its own files: weights
and ``trainer_state.json``. Without the other states it would silently continue with a fresh
optimizer. So these are restored here before the first step, and so are the weights, every byte
checked.

A step is saved when the next one begins: by then its log, its evaluation and the best metric exist.
Random states are captured at two moments, because the Trainer draws the data order at the beginning
of an epoch, and the rest at the beginning of a step.

The Trainer tells its callbacks that it resumes, but not from where. It does pass on what it read:
so a mark, unique to a save, is among the states of its callbacks in ``trainer_state.json``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ...checkpoint.disk import retention
from ...checkpoint.disk.commit import named, step_of
from ...checkpoint.disk.folder import open_checkpoint, tokenizer_of
from ...checkpoint.disk.retention import RetentionPolicy
from ...checkpoint.disk.trainer_state import finite
from ...checkpoint.loading import load
from ...checkpoint.saving.saver import AsyncSaver
from ...checkpoint.state.roles import Stateful
from ...checkpoint.state.states import ModuleState, NamedOptimizer, RandomState
from ...checkpoint.verification import expect_valid, recover_latest
from ...errors import CheckpointError, RunError, counted
from ...model.weights import (
    AdapterWeights,
    FullWeights,
    adapter_files,
    model_files,
    saved_files,
    tokenizer_files,
    trained,
)

logger = logging.getLogger(__name__)
STATE = "trainer_state.json"
_HOLDER, _MARK = "TrainerControl", "surefoot"  # an entry that the Trainer always has


class SurefootCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Saves ``trainer`` every ``save_steps`` steps, at each best step, and at the end.

    It adds itself to the trainer's callbacks. To start, or to resume after any interruption::

        checkpoints = SurefootCheckpoints(trainer, save_steps=100, keep=3)
        trainer.train(resume_from_checkpoint=checkpoints.newest())

    Args:
        trainer: with ``save_strategy="no"``; one process on one device.
        save_steps: steps between two checkpoints.
        keep: how many of the latest to keep, or a ``Rule``; all of them by default. The best by
            ``metric_for_best_model`` and the one resumed from are always kept.
        output_dir: the trainer's own by default.

    Raises:
        RunError: the trainer has settings that these checkpoints do not support.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        save_steps: int,
        keep: int | RetentionPolicy | None = None,
        output_dir: Path | str | None = None,
    ) -> None:
        if save_steps < 1:
            raise ValueError(f"save_steps must be at least 1, got {save_steps}")
        refuse_unsupported(trainer)
        self.trainer = trainer
        self.output_dir = Path(output_dir or trainer.args.output_dir)
        self.save_steps = save_steps
        self.keep = keep
        self._asked: Path | None = None  # where the Trainer was told to go on from
        self._saver: AsyncSaver | None = None
        self._parts: TrainerStates | None = None
        self._epoch_began: dict[str, Any] | None = None  # random generators
        self._restore: Generators | None = None  # generators still to be set
        self._is_wanted = False  # another callback asked for a save
        self._best: float | None = None  # metric, when last looked at
        trainer.add_callback(self)

    def newest(self) -> str | None:
        """The latest valid checkpoint, for ``resume_from_checkpoint``; None to start from scratch.

        One that fails verification is logged, renamed, and skipped.
        """
        self._close_quietly()
        self._asked = recover_latest(self.output_dir)
        return None if self._asked is None else str(self._asked)

    def checked(self, folder: Path | str) -> str:
        """``folder``, for ``resume_from_checkpoint``; raises if it is not valid."""
        expect_valid(Path(folder))
        self._asked = Path(folder)
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore all that the Trainer did not, or refuse to start."""
        self._close_quietly()
        if state.is_hyper_param_search:
            raise RunError("SurefootCheckpoints: hyperparameter search is not supported")
        parts = parts_of(self.trainer, kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])
        resumed = self._resumed_from(state, parts)
        self._refuse_to_run_into(state.global_step)
        if resumed is not None:
            generators = Generators()
            load(resumed, {**parts.states, "random": generators})
            restore_callbacks(state, self.trainer)
            self._restore = generators
            logger.info("resuming from %s at step %d", resumed.name, state.global_step)
        self._parts, self._best = parts, state.best_metric
        self._saver = AsyncSaver(
            self.output_dir,
            keep=self.keep,
            resumed_from=resumed,
            greater_is_better=bool(args.greater_is_better),
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The random states, restored or current, before the data order is drawn."""
        if self._restore is not None:
            RandomState().load_state_dict(self._restore.epoch)
        self._epoch_began = RandomState().state_dict()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the previous step, if it is due, now that it is logged and evaluated."""
        assert self._saver is not None
        if self._restore is not None and self._restore.step is not None:
            RandomState().load_state_dict(self._restore.step)
        self._restore = None
        self._note_best(state)
        step = state.global_step
        due = step % self.save_steps == 0 or step == state.best_global_step or self._is_wanted
        self._is_wanted = False
        if step and due:
            self._save(args, state, is_end=False)
        else:
            self._saver.poll()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """If another callback requests a save, do it instead of the Trainer."""
        self._is_wanted |= control.should_save
        control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same."""
        self.on_step_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the end, and wait until it is on the disk."""
        assert self._saver is not None
        self._note_best(state)
        if state.global_step:
            self._save(args, state, is_end=True)
        saver, self._saver = self._saver, None
        saver.close()

    def _save(self, args: Any, state: Any, *, is_end: bool) -> None:
        assert self._saver is not None
        assert self._parts is not None
        there = (self._saver.newest, self._saver.in_flight)
        if state.global_step in [step_of(folder) for folder in there if folder]:
            return  # this very state lies there already, perhaps in another folder
        self.trainer.store_flos()
        content = dump(state, self.trainer, self._best_folder(state))
        best = state.best_global_step
        generators = self._generators(state, is_end=is_end)
        self._saver.save(
            state.global_step,
            {**self._parts.states, "random": generators},
            kind=self._parts.kind,
            companions={**self._parts.companions, STATE: content},
            metrics=retention.metrics_in(state.log_history, metric(args)),
            protected=() if best is None else (best,),
        )

    def _best_folder(self, state: Any) -> Path | None:
        """The path of the best step, once the current step is saved."""
        assert self._saver is not None
        folder = self.output_dir / f"checkpoint-{state.best_global_step}"
        is_coming = state.best_global_step == state.global_step or folder == self._saver.in_flight
        return folder if is_coming or folder in named(self.output_dir) else None

    def _note_best(self, state: Any) -> None:
        """The Trainer only stores the step of its best metric if it saves by itself."""
        if state.best_metric != self._best and math.isfinite(state.best_metric):
            state.best_global_step = state.global_step
        self._best = state.best_metric

    def _generators(self, state: Any, *, is_end: bool) -> Generators:
        """Capture the random state with which the next step begins."""
        now = RandomState().state_dict()
        if is_end and state.epoch == int(state.epoch):  # it would begin with a new epoch
            return Generators(now, None)
        return Generators(self._epoch_began or now, now)

    def _resumed_from(self, state: Any, parts: TrainerStates) -> Path | None:
        """The Surefoot checkpoint whose state file the Trainer has read, if any."""
        if state.global_step == 0:
            return None
        mark = mark_of(state.stateful_callbacks)
        if mark is None and parts.optimizer_has_moved:
            return None  # a checkpoint of the Trainer's own, with its optimizer
        if mark is None:
            raise CheckpointError(
                f"the Trainer resumed from step {state.global_step} with a fresh optimizer: its "
                "checkpoint is neither one of these nor a complete one of its own"
            )
        for folder in (self._asked, self.output_dir / f"checkpoint-{state.global_step}"):
            if folder is not None and mark_in(folder) == mark:
                return folder
        raise CheckpointError(
            f"the Trainer resumed from a checkpoint of step {state.global_step} that is not in "
            f"{self.output_dir}, so its optimizer cannot be found; pass it as "
            "resume_from_checkpoint=checkpoints.checked(PATH)"
        )

    def _refuse_to_run_into(self, step: int) -> None:
        """Raise ``RunError`` if a checkpoint exists that this run would reach."""
        later = [folder for folder in named(self.output_dir) if step_of(folder) > step]
        if later:
            raise RunError(
                f"{self.output_dir} contains {later[-1].name}, which a run from step {step} "
                "would reach; resume from it with "
                "trainer.train(resume_from_checkpoint=checkpoints.newest()), or choose another "
                "output_dir"
            )

    def _close_quietly(self) -> None:
        """End what an interrupted ``train()`` left; its last save may still be committed."""
        saver, self._saver, self._restore = self._saver, None, None
        if saver is not None:
            try:
                saver.close()
            except CheckpointError as error:
                logger.error("%s", error)


def dump(state: Any, trainer: Trainer, best: Path | None) -> bytes:
    """The file as strict JSON (null for non-finite values), with the callbacks' current states."""
    callbacks: dict[str, Any] = {}
    for callback in _stateful(trainer):
        callbacks.setdefault(type(callback).__name__, []).append(callback.state())
    known = {name: found[0] if len(found) == 1 else found for name, found in callbacks.items()}
    known[_HOLDER] = {**trainer.control.state(), _MARK: secrets.token_hex(8)}
    content = {
        **dataclasses.asdict(state),
        "best_model_checkpoint": None if best is None else str(best),
        "stateful_callbacks": known,
    }
    return (json.dumps(finite(content), indent=2, sort_keys=True) + "\n").encode()


def restore_callbacks(state: Any, trainer: Trainer) -> None:
    """Restore the trainer's callbacks; new ones are not changed."""
    seen: dict[str, int] = {}
    for callback in _stateful(trainer):
        name = type(callback).__name__
        number = seen[name] = seen.get(name, -1) + 1
        found = state.stateful_callbacks.get(name, [])
        found = found if isinstance(found, list) else [found]
        if number < len(found):
            for attribute, value in found[number].get("attributes", {}).items():
                setattr(callback, attribute, value)


def mark_of(callbacks: object) -> str | None:
    """The mark in ``stateful_callbacks``, if Surefoot saved one there."""
    holder = callbacks.get(_HOLDER) if isinstance(callbacks, dict) else None
    mark = holder.get(_MARK) if isinstance(holder, dict) else None
    return mark if isinstance(mark, str) else None


def mark_in(folder: Path) -> str | None:
    """The mark of a Surefoot checkpoint."""
    try:
        content = json.loads(open_checkpoint(folder).small(STATE))
    except (CheckpointError, KeyError, ValueError):
        return None
    return mark_of(content.get("stateful_callbacks"))


def metric(args: Any) -> str:
    """The name under which the log has the metric of the best model."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def _stateful(trainer: Trainer) -> Iterator[Any]:
    return (c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState))


@dataclass
class Generators:
    """The random generators at the beginning of the epoch and, within it, of the next step."""

    epoch: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] | None = None  # None: the next step is the first of an epoch

    def state_dict(self) -> dict[str, Any]:
        """Both."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Both; the caller sets them at the right moment."""
        self.epoch, self.step = state["epoch"], state["step"]


@dataclass(frozen=True)
class TrainerStates:
    """The states of a Trainer's run for every checkpoint."""

    states: Mapping[str, Stateful]
    kind: Literal["full", "adapter"]
    companions: Mapping[str, bytes]
    optimizer_has_moved: bool  # whether it has any state yet


def refuse_unsupported(trainer: Trainer) -> None:
    """Raise ``RunError`` if the Trainer saves itself, or keeps its state in several places."""
    args = trainer.args
    saves_itself = f"save_strategy is {args.save_strategy.value!r}"
    settings = {
        saves_itself: args.save_strategy != "no",
        "enable_jit_checkpoint is on": args.enable_jit_checkpoint,
        "auto_find_batch_size is on": args.auto_find_batch_size,
    }
    for setting, is_on in settings.items():
        if is_on:
            value = '"no"' if setting == saves_itself else "False"
            raise RunError(
                f"SurefootCheckpoints: {setting}, so the Trainer would save or restart by "
                f"itself; set {setting.split()[0]}={value}"
            )
    kinds = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "a model that is sharded while it loads": trainer.is_distributed_loading_by_transformers,
        "several processes": args.world_size > 1,
        "several GPUs in one process": args.n_gpu > 1,
    }
    for kind, is_on in kinds.items():
        if is_on:
            raise RunError(
                f"SurefootCheckpoints: {kind}: not supported; it saves the state of one process on "
                "one device"
            )


def parts_of(trainer: Trainer, model: nn.Module, optimizer: Any, scheduler: Any) -> TrainerStates:
    """The states of a run that is about to begin. Raises ``RunError`` for a model of no kind."""
    weights, kind = _weights(model)
    named = list(model.named_parameters())
    if not isinstance(weights, ModuleState):
        named = trained(model, weights.state_dict())
    states: dict[str, Stateful] = {
        "model": weights,
        "optimizer": NamedOptimizer(optimizer, named),
        "scheduler": scheduler,
    }
    if optimizer.scaler is not None:
        states["scaler"] = optimizer.scaler
    files = {**_model_files(model, kind), **_processing_files(trainer)}
    return TrainerStates(states, kind, files, bool(optimizer.state))


def _weights(
    model: nn.Module,
) -> tuple[FullWeights | AdapterWeights | ModuleState, Literal["full", "adapter"]]:
    from peft import PeftModel

    if isinstance(model, PeftModel):
        _refuse_adapters(model)
        return AdapterWeights(model), "adapter"
    if not isinstance(model, PreTrainedModel):
        _refuse_ties(model)
        return ModuleState(model), "full"
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RunError(
            "SurefootCheckpoints: adapters added with add_adapter() are not supported; wrap the "
            "model with peft.get_peft_model() instead"
        )
    return FullWeights(model), "full"


def _refuse_ties(model: nn.Module) -> None:
    if tied := sorted(model.state_dict().keys() - ModuleState(model).state_dict().keys()):
        raise RunError(
            f"SurefootCheckpoints: {tied[0]} is tied to another tensor, and the Trainer can only "
            "load tied tensors into a PreTrainedModel"
        )


def _refuse_adapters(model: Any) -> None:
    """Reject what could not be restored from the one file from which PEFT reads an adapter."""
    if list(model.peft_config) != ["default"]:
        raise RunError(
            f"SurefootCheckpoints: the adapters {', '.join(model.peft_config)}: expected one, "
            "called default"
        )
    weights = AdapterWeights(model)
    known = weights.state_dict()
    if lost := [name for name, _ in trained(model, known) if name not in known]:
        found = counted(len(lost), "trainable parameter is", "trainable parameters are")
        raise RunError(
            f"SurefootCheckpoints: {found} not in a PEFT adapter's file (for example {lost[0]}); "
            "freeze every such parameter, or name its module in modules_to_save"
        )


def _model_files(model: nn.Module, kind: Literal["full", "adapter"]) -> dict[str, bytes]:
    if kind == "adapter":
        return adapter_files(model)
    if not isinstance(model, PreTrainedModel):
        return {}
    has_code = bool(getattr(model.config, "auto_map", None)) and bool(model.name_or_path)
    code = Path(model.name_or_path) if has_code else None
    return model_files(model, code, ())


def _processing_files(trainer: Trainer) -> dict[str, bytes]:
    """The tokenizer's or processor's files; as in the Trainer, the collator's if there is none."""
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if isinstance(processing, PreTrainedTokenizerBase):
        own = tokenizer_of(Path(processing.name_or_path))
        return tokenizer_files(processing, own)
    return {} if processing is None else saved_files(processing)
