"""What the loop knows (TrainerState) and what callbacks may ask of it (TrainerControl).

Names and spelling are those of the Hugging Face Trainer, so that ``trainer_state.json`` reads the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

Record = dict[str, float]


@dataclass
class TrainerState:
    """Progress of a run. Everything here is saved, so every figure is right after a resume."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: float = 0.0
    train_batch_size: int = 0  # micro_batch_size
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0  # estimate: 6 x parameters x tokens
    log_history: list[Record] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    # Ours; not in trainer_state.json.
    train_loss_total: float = 0.0  # sum of step losses, for the mean over the whole run
    train_runtime: float = 0.0  # seconds of training, over all sessions
    interval_loss: float = 0.0  # sums since the last log
    interval_weight: float = 0.0
    interval_metrics: dict[str, float] = field(default_factory=dict)
    interval_figures: dict[str, float] = field(default_factory=dict)  # of windows as a whole
    interval_windows: int = 0
    skipped_windows: list[tuple[int, int]] = field(default_factory=list)  # (epoch, index) left out
    num_skipped_steps: int = 0  # steps without an update: a loss or gradient was not a number
    attention: str | None = None  # the kernel of packed rows, which a resume keeps
    shares_prompts: bool | None = None  # whether its packed rows do, which a resume keeps
    pending: list[str] = field(default_factory=list)  # control flags a stop left raised

    def state_dict(self) -> dict[str, object]:
        """All fields as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Become ``state``, but keep how long this run is meant to be."""
        kept = {"max_steps", "num_train_epochs", "train_batch_size"}
        for known in fields(self):
            if known.name in state and known.name not in kept:
                setattr(self, known.name, state[known.name])
        self.skipped_windows = [(epoch, index) for epoch, index in self.skipped_windows]

    def for_people(
        self, section_steps: Mapping[str, int | None], best: str | None
    ) -> dict[str, object]:
        """The content of ``trainer_state.json``: the fields the Hugging Face Trainer knows, no
        others.

        Args:
            section_steps: ``log_steps``, ``eval_steps`` and ``save_steps`` of the recipe.
            best: path of the best checkpoint.
        """
        ours = {
            "skipped_windows",
            "num_skipped_steps",
            "attention",
            "shares_prompts",
            "pending",
            "train_loss_total",
            "train_runtime",
        }
        ours |= {name for name in asdict(self) if name.startswith("interval_")}
        return {name: value for name, value in asdict(self).items() if name not in ours} | {
            "best_model_checkpoint": best,
            "logging_steps": section_steps["log_steps"] or 0,
            "eval_steps": section_steps["eval_steps"] or 0,
            "save_steps": section_steps["save_steps"] or 0,
            "is_hyper_param_search": False,
            "trial_name": None,
            "trial_params": None,
            "stateful_callbacks": {},
        }


@dataclass
class TrainerControl:
    """Flags that callbacks raise and the loop lowers when it has acted."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
