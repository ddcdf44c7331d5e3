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

from ...checkpoint.disk.commit import named, step_of
from ...checkpoint.disk.folder import metrics_in, open_checkpoint, tokenizer_of
from ...checkpoint.disk.retention import RetentionPolicy
from ...checkpoint.disk.strict_json import finite
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
Kind = Literal["full", "adapter"]


class SurefootCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Saves ``trainer`` every ``save_steps`` steps, at each best step, and at the end.

    It adds itself to the trainer's callbacks. To start, or to resume after any interruption::

        checkpoints = SurefootCheckpoints(trainer, save_steps=100, keep=3)
        trainer.train(resume_from_checkpoint=checkpoints.newest())

    Args:
        trainer: with ``save_strategy="no"``; one process on one device.
        save_steps: steps between two checkpoints.
        keep: how many of the latest to keep, or a ``RetentionPolicy``; all of them by default. The
            best by ``metric_for_best_model`` and the one resumed from are always kept.
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
        _refuse_unsupported(trainer)
        self.trainer = trainer
        self.output_dir = Path(output_dir or trainer.args.output_dir)
        self.save_steps = save_steps
        self.keep = keep
        self._chosen: Path | None = None  # by ``newest`` or ``checked``, to resume from
        self._saver: AsyncSaver | None = None
        self._states: Mapping[str, Stateful] = {}
        self._generators = Generators()
        self._restores_generators = False  # they are restored, and still to be set
        self._is_save_requested = False  # by another callback
        self._best: float | None = None  # metric, when last looked at
        self._saved_step = 0  # or resumed from
        # By itself: only with the trainer does it see the other callbacks, whose state it saves.
        # The patience of early stopping is lost otherwise (decisions/0020).
        trainer.add_callback(self)

    def newest(self) -> str | None:
        """The latest valid checkpoint, for ``resume_from_checkpoint``; None to start from scratch.

        One that fails verification is logged, renamed, and skipped.
        """
        self._close_quietly()
        self._chosen = recover_latest(self.output_dir)
        return None if self._chosen is None else str(self._chosen)

    def checked(self, folder: Path | str) -> str:
        """``folder``, for ``resume_from_checkpoint``; raises if it is not valid."""
        expect_valid(Path(folder))
        self._chosen = Path(folder)
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore all that the Trainer did not, or refuse to start."""
        self._close_quietly()
        if state.is_hyper_param_search:
            raise RunError("SurefootCheckpoints: hyperparameter search is not supported")
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        weights, kind = _weights(model)
        names = list(model.named_parameters())
        if not isinstance(weights, ModuleState):
            names = trained(model, weights.state_dict())
        self._generators = Generators()
        self._states = {
            "model": weights,
            "optimizer": NamedOptimizer(optimizer, names),
            "scheduler": kwargs["lr_scheduler"],
            "random": self._generators,
        }
        if optimizer.scaler is not None:
            self._states["scaler"] = optimizer.scaler
        resumed = self._resumed_from(state, has_optimizer=bool(optimizer.state))
        self._refuse_to_run_into(state.global_step)
        if resumed is not None:
            load(resumed, self._states)
            _restore_callbacks(state, self.trainer)
            self._restores_generators = True
            logger.info("resuming from %s at step %d", resumed.name, state.global_step)
        self._best, self._saved_step = state.best_metric, state.global_step
        self._saver = AsyncSaver(
            self.output_dir,
            keep=self.keep,
            resumed_from=resumed,
            greater_is_better=bool(args.greater_is_better),
            kind=kind,
            companions={**_model_files(model, kind), **_processing_files(self.trainer)},
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The random states, restored or current, before the data order is drawn."""
        # The Trainer draws the order of an epoch's data from these, and dropout from those that
        # `on_step_begin` sets: restored at another moment, either would differ (decisions/0020).
        if self._restores_generators:
            RandomState().load_state_dict(self._generators.epoch)
        self._generators.epoch = RandomState().state_dict()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the previous step, if it is due, now that it is logged and evaluated."""
        assert self._saver is not None
        if self._restores_generators and self._generators.step is not None:
            RandomState().load_state_dict(self._generators.step)
        self._restores_generators = False
        self._note_best(state)
        step = state.global_step
        is_due = step % self.save_steps == 0 or step == state.best_global_step
        if step and (is_due or self._is_save_requested):
            self._save(args, state, is_end=False)
        else:
            self._saver.poll()
        self._is_save_requested = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """If another callback requests a save, do it instead of the Trainer."""
        self._is_save_requested |= control.should_save
        control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over what was requested at the end of an epoch, too."""
        self.on_step_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the end, and wait until it is on the disk."""
        assert self._saver is not None
        self._note_best(state)
        self._save(args, state, is_end=True)
        saver, self._saver = self._saver, None
        saver.close()

    def _save(self, args: Any, state: Any, *, is_end: bool) -> None:
        assert self._saver is not None
        step, best = state.global_step, state.best_global_step
        if step == self._saved_step:
            return  # this very state exists already, perhaps in another folder
        self._saved_step = step
        # The Trainer adds them up at logs and at its own saves; later ones would be lost.
        self.trainer.store_flos()
        self._generators.step = RandomState().state_dict()
        if is_end and state.epoch == int(state.epoch):  # the next step would begin an epoch
            self._generators.epoch, self._generators.step = self._generators.step, None
        best_path = self._saver.path_of(best or 0)
        is_saved = best == step or best_path in (self._saver.in_flight, *named(self.output_dir))
        content = {
            **dataclasses.asdict(state),
            "best_model_checkpoint": str(best_path) if is_saved else None,
            "stateful_callbacks": _callback_states(self.trainer),
        }
        # strict JSON: null for values that are not finite
        text = json.dumps(finite(content), indent=2, sort_keys=True) + "\n"
        metric = args.metric_for_best_model or "loss"
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        self._saver.save(
            step,
            self._states,
            companions={STATE: text.encode()},
            metrics=metrics_in(state.log_history, metric),
            protected=() if best is None else (best,),
        )

    def _note_best(self, state: Any) -> None:
        """The Trainer only stores the step of its best metric if it saves by itself."""
        if state.best_metric != self._best and math.isfinite(state.best_metric):
            state.best_global_step = state.global_step
        self._best = state.best_metric

    def _resumed_from(self, state: Any, *, has_optimizer: bool) -> Path | None:
        """The Surefoot checkpoint whose state file the Trainer has read, if any."""
        if state.global_step == 0:
            return None
        for folder in (self._chosen, self.output_dir / f"checkpoint-{state.global_step}"):
            if folder is not None and _is_read(folder, state.stateful_callbacks):
                return folder
        if has_optimizer:
            return None  # a checkpoint of the Trainer's own, with its optimizer
        raise CheckpointError(
            f"the Trainer resumed from step {state.global_step} with a fresh optimizer: the "
            f"checkpoint is neither a complete one of its own nor one in {self.output_dir}; pass "
            "it as resume_from_checkpoint=checkpoints.checked(PATH)"
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
        saver, self._saver, self._restores_generators = self._saver, None, False
        if saver is not None:
            try:
                saver.close()
            except CheckpointError as error:
                # Not raised: what failed is over, and the training that begins now is another one.
                logger.error("%s", error)


def _is_read(folder: Path, callback_states: Mapping[str, Any]) -> bool:
    """Whether it is a Surefoot checkpoint, and the one with these states: their mark says so."""
    try:
        content = json.loads(open_checkpoint(folder).small(STATE))
        return bool(
            content["stateful_callbacks"][_HOLDER][_MARK] == callback_states[_HOLDER][_MARK]
        )
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False


def _stateful(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The trainer's callbacks that have states, and their names in its state file."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            yield type(callback).__name__, callback


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    """As the Trainer itself writes them: a list for several callbacks of one class."""
    states = dict[str, Any]()
    for name, callback in _stateful(trainer):
        states.setdefault(name, []).append(callback.state())
    states = {name: each[0] if len(each) == 1 else each for name, each in states.items()}
    return states | {_HOLDER: {**trainer.control.state(), _MARK: secrets.token_hex(8)}}


def _restore_callbacks(state: Any, trainer: Trainer) -> None:
    """Restore the trainer's callbacks; new ones are not changed."""
    # One callback of a class is no list in the file, as the Trainer writes it.
    saved = {
        name: list(each) if isinstance(each, list) else [each]
        for name, each in state.stateful_callbacks.items()
    }
    for name, callback in _stateful(trainer):
        if saved.get(name):
            for attribute, value in saved[name].pop(0).get("attributes", {}).items():
                setattr(callback, attribute, value)


@dataclass
class Generators:
    """The random generators at the beginning of the epoch and, within it, of the next step."""

    epoch: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] | None = None  # None: the next step is the first of an epoch

    def state_dict(self) -> dict[str, Any]:
        """Both moments, for a checkpoint."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Both; the callback sets them at the right moment."""
        self.epoch, self.step = state["epoch"], state["step"]


def _refuse_unsupported(trainer: Trainer) -> None:
    """Raise ``RunError`` if the Trainer saves itself, or keeps its state in several places."""
    args = trainer.args
    by_itself = "so the Trainer would save or restart by itself; set"
    alone = "not supported; it saves the state of one process on one device"
    reasons = {
        f'save_strategy is {args.save_strategy.value!r}, {by_itself} save_strategy="no"': (
            args.save_strategy != "no"
        ),
        f"enable_jit_checkpoint is on, {by_itself} enable_jit_checkpoint=False": (
            args.enable_jit_checkpoint
        ),
        f"auto_find_batch_size is on, {by_itself} auto_find_batch_size=False": (
            args.auto_find_batch_size
        ),
        f"DeepSpeed: {alone}": trainer.is_deepspeed_enabled,
        f"FSDP: {alone}": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        f"a model that is sharded while it loads: {alone}": (
            trainer.is_distributed_loading_by_transformers
        ),
        f"several processes: {alone}": args.world_size > 1,
        f"several GPUs in one process: {alone}": args.n_gpu > 1,
    }
    for reason, is_on in reasons.items():
        if is_on:
            raise RunError(f"SurefootCheckpoints: {reason}")


def _weights(model: nn.Module) -> tuple[FullWeights | AdapterWeights | ModuleState, Kind]:
    """What a checkpoint has of ``model``. Raises ``RunError`` for what the Trainer, or PEFT from
    its one file, could not load again."""
    from peft import PeftModel

    if isinstance(model, PeftModel):
        # An adapter's file has no names of adapters, and PEFT reads it back as "default".
        if list(model.peft_config) != ["default"]:
            raise RunError(
                f"SurefootCheckpoints: the adapters {', '.join(model.peft_config)}: expected one, "
                "called default"
            )
        adapter = AdapterWeights(model)
        stored = adapter.state_dict()
        if lost := [name for name, _ in trained(model, stored) if name not in stored]:
            number = counted(len(lost), "trainable parameter is", "trainable parameters are")
            raise RunError(
                f"SurefootCheckpoints: {number} not in a PEFT adapter's file (for example "
                f"{lost[0]}); freeze every such parameter, or name its module in modules_to_save"
            )
        return adapter, "adapter"
    if not isinstance(model, PreTrainedModel):
        module = ModuleState(model)
        if tied := sorted(model.state_dict().keys() - module.state_dict().keys()):
            raise RunError(
                f"SurefootCheckpoints: {tied[0]} is tied to another tensor, and the Trainer can "
                "only load tied tensors into a PreTrainedModel"
            )
        return module, "full"
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RunError(
            "SurefootCheckpoints: adapters added with add_adapter() are not supported; wrap the "
            "model with peft.get_peft_model() instead"
        )
    return FullWeights(model), "full"


def _model_files(model: nn.Module, kind: Kind) -> dict[str, bytes]:
    if kind == "adapter":
        return adapter_files(model)
    if not isinstance(model, PreTrainedModel):
        return {}
    # A model with code of its own cannot be opened without that code.
    has_code = bool(getattr(model.config, "auto_map", None)) and bool(model.name_or_path)
    code = Path(model.name_or_path) if has_code else None
    return model_files(model, code, ())


def _processing_files(trainer: Trainer) -> dict[str, bytes]:
    """The tokenizer's or processor's files; as in the Trainer, the collator's if there is none."""
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if isinstance(processing, PreTrainedTokenizerBase):
        return tokenizer_files(processing, tokenizer_of(Path(processing.name_or_path)))
    return {} if processing is None else saved_files(processing)
