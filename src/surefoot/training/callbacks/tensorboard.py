"""TensorBoard event files under ``tensorboard/`` of the run, for ``report_to: [tensorboard]``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import RecipeError, RunError, installation
from ...storage.files import explain, raising, rename
from ..callback import Context, Metrics, TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)
FOLDER = "tensorboard"
_EVENTS = "events.out.tfevents.*"


def _put_before(paths: Sequence[Path], now: int) -> None:
    """Rename event files of the future, after the clock went back: TensorBoard reads files in the
    order of the times in their names, and the new one must be the last."""
    times = [path.name.split(".")[3] for path in paths]
    if any(text.isdecimal() and int(text) >= now for text in times):
        with raising(RunError, "tensorboard"):
            for number, (path, text) in enumerate(zip(paths, times, strict=True), -len(paths)):
                name = path.name.replace(text, f"{now + number:010d}", 1)
                rename(path, path.with_name(name))


@dataclass
class TensorBoard(TrainerCallback):
    """Writes every log as scalars; steps that a resume repeats replace the old ones."""

    folder: Path
    _writer: SummaryWriter | None = field(default=None, init=False)

    def on_init_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Detect a missing package before the first step, not at the first log."""
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise RecipeError(
                f"train.report_to: tensorboard is not installed; {installation('tensorboard')}"
            ) from None

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Open the event file; ``purge_step`` hides what a killed run wrote after its last save.
        Without earlier event files, the log of the run so far is written first."""
        with self._dropped():
            self._open(state)

    def _open(self, state: TrainerState) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _put_before(sorted(self.folder.glob(_EVENTS)), int(time.time()))
        is_new = not any(self.folder.glob(_EVENTS))
        purge = state.global_step + 1 if state.global_step else None
        self._writer = SummaryWriter(str(self.folder), purge_step=purge)
        for logs in state.log_history if is_new else ():
            if "step" in logs:
                self._write(self._writer, logs, int(logs["step"]))

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """``loss`` as ``train/loss``, ``eval_loss`` as ``eval/loss``."""
        if self._writer is not None:
            with self._dropped():
                self._write(self._writer, logs, state.global_step)
                self._writer.flush()

    def _write(self, writer: SummaryWriter, logs: Metrics, step: int) -> None:
        for name, value in logs.items():
            if name not in ("step", "epoch"):
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                writer.add_scalar(tag, value, step)

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Close the file."""
        if self._writer is not None:
            with self._dropped():
                self._writer.close()
            self._writer = None

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        """A disk that cannot hold the files does not stop a run: the log says so, once."""
        try:
            yield
        except (OSError, RuntimeError, RunError) as error:  # the package's thread passes on any
            reason = explain(error) if isinstance(error, OSError) else str(error)
            logger.warning("tensorboard: dropped: %s; metrics.jsonl has all figures", reason)
            self._writer = None
