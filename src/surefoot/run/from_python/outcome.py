"""What a program gets back from a run."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...training.evaluation import EVALUATION
from ...training.state import Record, TrainerState
from ...training.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its state, the trained model, and the signal that stopped it, if one did.

    The model is ready to ``generate``. On several ranks, it is this rank's shards.
    """

    state: TrainerState
    model: nn.Module = field(repr=False)  # with its adapter, in evaluation mode
    tokenizer: PreTrainedTokenizerBase = field(repr=False)  # with the chat template of the run
    output_dir: Path
    signal: signal.Signals | None = None
    is_main: bool = True  # whether this is the rank that speaks for all

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run."""
        return self.state.global_step

    @property
    def log_history(self) -> list[Record]:
        """All logs and evaluations."""
        return self.state.log_history

    @property
    def best_metric(self) -> float | None:
        """The value of ``train.metric_for_best_model`` at ``best_global_step``."""
        return self.state.best_metric

    @property
    def best_global_step(self) -> int | None:
        """The step of the best checkpoint."""
        return self.state.best_global_step


def outcome_of(trainer: Trainer) -> Outcome:
    """The model of a run that has ended, ready to generate."""
    codec = trainer.evaluation.context((EVALUATION, 0)).codec
    return Outcome(
        trainer.state,
        trainer.policy.module.eval(),
        codec.tokenizer,
        trainer.section.folder,
        trainer.signal,
        trainer.world.is_main,
    )
