"""The callback ``mindspore``: what a run saves is written in MindSpore's form as well, beside its
checkpoints, by ``surefoot ckpt convert`` in a process of its own."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError
from ...storage.child import Child
from ...storage.files import read_file
from ...training.arguments import Context
from ...training.callback import TrainerCallback, TrainerControl, TrainerState
from .reading import FamilyName
from .tensor_layout import ParallelConfig

logger = logging.getLogger(__name__)
_FOLDER, _LOG = "mindspore-{}", "mindspore.log"


@dataclass(kw_only=True)
class MindSporeSaves(TrainerCallback):
    """Write ``mindspore-STEP`` beside ``checkpoint-STEP``, with the options of ``ckpt convert``. A
    write that fails is a warning."""

    checkpoints: Literal["all", "best", "last"] = "all"
    """Of which checkpoints; of best and last, the one before is then deleted."""
    parallel_config: str | None = None
    """How it is sharded over MindSpore's ranks; unset: full tensors."""
    remove_redundancy: bool = False
    """Write a slice that several ranks share only once."""
    iteration: bool = False
    """Write the newer form of MindSpore Transformers 2.x."""
    names: FamilyName | None = None
    """The family of names; unset: the usual one."""

    def __post_init__(self) -> None:
        self._due: list[int] = []  # steps
        self._child: Child | None = None
        self._step = 0  # that it writes
        try:
            ParallelConfig.from_text(self.parallel_config or "data_parallel=1")
        except CheckpointError as error:
            raise ValueError(str(error)) from None

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A launch that was killed may have left its last checkpoint unconverted."""
        saved = args.output_dir / f"checkpoint-{state.global_step}"
        written = args.output_dir / _FOLDER.format(state.global_step)
        if state.is_world_process_zero and saved.is_dir() and not written.exists():
            self.on_save(args, state, control)

    def on_save(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Write it now, or after the one that is being written."""
        if self.checkpoints == "best" and state.best_global_step != state.global_step:
            return
        self._due = [*(self._due if self.checkpoints == "all" else ()), state.global_step]
        self._continue(args.output_dir)

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The process may have ended in the meantime."""
        self._continue(args.output_dir)

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Wait for those that are left."""
        while self._child is not None or self._due:
            if self._child is not None:
                self._child.process.wait()
            self._continue(args.output_dir)

    def _continue(self, run: Path) -> None:
        """Start the next one, unless one is being written."""
        if self._child is not None:
            if self._child.code is None:
                return
            self._ended(self._child.code, run)
        if self._due:
            self._step = self._due.pop(0)
            try:
                self._child = Child(["-m", "surefoot", *self._command(run)], log=run / _LOG)
                os.setpriority(os.PRIO_PROCESS, self._child.process.pid, 19)
            except OSError as error:
                logger.warning("%s is not written: %s", _FOLDER.format(self._step), error)

    def _command(self, run: Path) -> Sequence[str]:
        words = ["ckpt", "convert", str(run / f"checkpoint-{self._step}")]
        words += [str(run / _FOLDER.format(self._step)), "--to", "mindspore"]
        if self.parallel_config is not None:
            words += ["--layout", "distributed", "--parallel-config", self.parallel_config]
        words += ["--names", self.names] if self.names else []
        words += ["--remove-redundancy"] if self.remove_redundancy else []
        return [*words, *(["--iteration"] if self.iteration else [])]

    def _ended(self, code: int, run: Path) -> None:
        """Report it; of the best or last alone, delete the one before."""
        self._child, name = None, _FOLDER.format(self._step)
        if code:
            reason = read_file(run / _LOG).decode(errors="replace").strip()
            reason = reason.rpartition("\n")[2].removeprefix("error: ")
            logger.warning("%s is not written: %s; training continues", name, reason)
            return
        logger.info("wrote %s", run / name)
        if self.checkpoints != "all":
            for folder in run.glob(_FOLDER.format("*")):
                if folder.name != name and folder.name.rpartition("-")[2].isdecimal():
                    shutil.rmtree(folder, ignore_errors=True)
