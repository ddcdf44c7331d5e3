"""Tells trackers and the webhook what happens to a run; rank 0 only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..callback import Context, Metrics, TrainerCallback
from ..state import TrainerControl, TrainerState
from .trackers.launching import TrackerProcess


@dataclass
class Reports(TrainerCallback):
    """The metrics themselves are read from ``metrics.jsonl`` by each tracker's process."""

    processes: list[TrackerProcess]
    _num_skipped: int | None = field(default=None, init=False)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Steps that earlier launches skipped do not count."""
        self._num_skipped = state.num_skipped

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Look for skipped steps."""
        self._note_skipped(state)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Log what trackers have said, each thing once."""
        self._note_skipped(state)
        for one in self.processes:
            one.log_messages()

    def _note_skipped(self, state: TrainerState) -> None:
        """A step or batch that was skipped has the first NaN or infinity of this launch."""
        if self._num_skipped is None or state.num_skipped <= self._num_skipped:
            return
        self._num_skipped = None
        for one in self.processes:
            one.tell(event="nan", step=state.global_step)
