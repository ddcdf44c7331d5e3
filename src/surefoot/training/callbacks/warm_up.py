"""Log how long the first step took if layers are compiled, so that it does not seem to hang."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ..callback import Context, TrainerCallback
from ..state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


@dataclass
class WarmUp(TrainerCallback):
    """Logs the first step of this launch, which compiles."""

    began: float | None = None
    is_over: bool = False

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Start the clock."""
        if self.began is None:
            self.began = time.monotonic()
            logger.info("step %d compiles the layers, which takes a while", state.global_step + 1)

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Log, once."""
        if self.began is not None and not self.is_over:
            self.is_over = True
            seconds = time.monotonic() - self.began
            logger.info("step %d took %.0f s, most of it to compile", state.global_step, seconds)
