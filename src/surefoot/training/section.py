"""The recipe's ``train`` section."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checkpoint.disk.retention import more_is_better
from ..storage.address import Address, default_cache

_HALF_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")  # as a path, s3:// has lost a slash


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How long to train, in what steps, and what to report on the way."""

    output_dir: Address | Path  # a URL first: any text is a path
    """Folder of the run: checkpoints, ``metrics.jsonl``, ``recipe.yaml``. Relative to the current
    folder; or the URL of a folder in a store (``s3://bucket/run``, ``gs://…``)."""
    cache_dir: Path | None = None
    """Where runs with a URL work before what they save is uploaded; unset, ``surefoot/runs`` in the
    user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``)."""
    num_epochs: float = 3.0
    """Passes over the training examples; ``max_steps`` wins over it."""
    max_steps: int | None = None
    """Optimizer steps to train for."""
    global_batch_size: int = 16
    """Examples per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int = 4
    """Examples per forward and backward pass on one rank, on average: those of a step are dealt out
    by their lengths, so that all passes are equally large."""
    seed: int = 42
    """Seed of everything random: data order, dropout, new weights."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward. ``auto``: bf16 on a GPU that has it, otherwise fp32."""
    deterministic: bool = True
    """Only kernels that give the same bits every time. Resuming is bitwise exact with it."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """When a loss or gradient is not a number: stop, leave the step out, or go back to the last
    checkpoint and leave out the batch."""
    log_steps: int | None = 10
    """Report every so many steps."""
    log_minutes: float | None = None
    """Report every so many minutes."""
    log_epoch: bool = False
    """Report at the end of every epoch."""
    eval_steps: int | None = None
    """Evaluate every so many steps."""
    eval_minutes: float | None = None
    """Evaluate every so many minutes."""
    eval_epoch: bool = False
    """Evaluate at the end of every epoch."""
    metric_for_best_model: str = "eval_loss"
    """Metric by which the best checkpoint is chosen."""
    greater_is_better: bool | None = None
    """Whether more of that metric is better; unset, it is not for a name that ends in ``loss`` or
    ``perplexity``."""
    load_best_model_at_end: bool = False
    """End with the weights of the best checkpoint: evaluations are then always saved."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations without a better metric."""
    early_stopping_threshold: float = 0.0
    """By how much a metric must be better to count for early stopping."""
    report_to: tuple[Literal["tensorboard"], ...] = ()
    """Trackers beside ``metrics.jsonl``. ``tensorboard`` needs ``pip install
    tensorboard``."""

    def __post_init__(self) -> None:
        self._check_output_dir()
        for name in ("global_batch_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"micro_batch_size ({self.micro_batch_size})"
            )
        for name in ("max_steps", "log_steps", "eval_steps", "early_stopping_patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("log_minutes", "eval_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.num_epochs <= 0:
            raise ValueError(f"num_epochs must be positive, got {self.num_epochs}")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm must not be negative, got {self.max_grad_norm}")

    def _check_output_dir(self) -> None:
        if isinstance(self.output_dir, Path) and _HALF_A_URL.match(str(self.output_dir)):
            raise ValueError(
                f"output_dir: {str(self.output_dir)!r} is neither a path nor a whole URL; "
                "expected for example runs/qwen or s3://bucket/run"
            )

    @property
    def folder(self) -> Path:
        """The local folder that the run works in: ``output_dir``, or its place in the cache."""
        if isinstance(self.output_dir, Path):
            return self.output_dir
        return (self.cache_dir or default_cache()) / self.output_dir.slug

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def is_greater_better(self) -> bool:
        """Which way ``metric_for_best_model`` is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return more_is_better(self.metric_for_best_model)
