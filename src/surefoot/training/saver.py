"""The loop's side of checkpoints: where they go, what lies beside the weights, what becomes of old
ones."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checkpoint.retention import forget
from ..checkpoint.save import save
from ..checkpoint.section import CheckpointSection
from ..checkpoint.states import Stateful
from ..errors import CheckpointError
from .state import TrainerState

logger = logging.getLogger(__name__)
Companions = Mapping[str, bytes]


@dataclass
class Saver:
    """Saves a run's states under ``output_dir`` as its recipe's ``checkpoint`` section says."""

    output_dir: Path
    section: CheckpointSection
    kind: Literal["full", "adapter"]
    companions: Companions  # files that lie beside the weights in every checkpoint
    steps: Mapping[str, int | None]  # log_steps, eval_steps, save_steps, for trainer_state.json
    resumed_from: Path | None = None
    newest: Path | None = None

    def save(self, state: TrainerState, states: Mapping[str, Stateful]) -> Path | None:
        """Save step ``state.global_step``; None if that failed and the recipe says to go on.

        Raises:
            CheckpointError: the save failed; no earlier checkpoint was touched.
        """
        target = self.path_of(state.global_step)
        if self.newest == target:
            return target  # this very state lies there already
        try:
            save(
                self.output_dir,
                state.global_step,
                states,
                kind=self.kind,
                companions={**self.companions, "trainer_state.json": self._for_people(state)},
                parent=self.newest.name if self.newest else None,
                max_shard_size=self.section.max_shard_size,
            )
        except CheckpointError as error:
            if self.section.on_save_error == "stop":
                raise
            logger.warning("%s; going on, newest checkpoint: %s", error, self.newest)
            return None
        self.newest = target
        self.forget_old(state)
        return target

    def forget_old(self, state: TrainerState) -> None:
        """Delete what retention lets go: never the newest, the best, or the one resumed from."""
        best = None if state.best_global_step is None else self.path_of(state.best_global_step)
        protected = {path for path in (best, self.resumed_from, self.newest) if path}
        forget(self.output_dir, keep=self.section.keep, protected=protected)

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``."""
        return self.output_dir / f"checkpoint-{step}"

    def _for_people(self, state: TrainerState) -> bytes:
        best = None if state.best_global_step is None else str(self.path_of(state.best_global_step))
        content = state.for_people(self.steps, best)
        return (json.dumps(_finite(content), indent=2, sort_keys=True) + "\n").encode()


def _finite(value: object) -> object:
    """``value`` with null for what strict JSON has no word for: nan and the infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
