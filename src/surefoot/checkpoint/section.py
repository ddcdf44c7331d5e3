"""The recipe's ``checkpoint`` section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..storage.address import Address
from .disk.manifest import Layout
from .disk.retention import RetentionPolicy


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, what to keep, and where to go on from. The last step is always saved."""

    save_steps: int | None = 200
    """Save every so many steps."""
    save_minutes: float | None = None
    """Save every so many minutes."""
    save_epoch: bool = False
    """Save at the end of every epoch."""
    keep: int | None = 3
    """How many of the newest checkpoints stay, beside the best one; unset, all do."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay as well, for ever."""
    keep_best: int | None = None
    """How many of the best checkpoints by ``train.metric_for_best_model`` stay; unset, one."""
    keep_hours: float | None = None
    """Checkpoints saved within so many hours before the newest stay as well."""
    resume: str = "auto"
    """``auto``: the newest checkpoint that verifies; ``none``: start anew; or a folder: of ours, of
    Hugging Face's Trainer, or of MindSpore Transformers."""
    max_shard_size: int = 5_000_000_000
    """Largest weight file in bytes; bigger models are split as Hugging Face splits them."""
    layout: Layout | None = None
    """``full``: whole tensors in files that Hugging Face's libraries and PEFT open as they lie,
    also of several processes; ``distributed``: a folder for every rank, for object stores and for
    PyTorch's distributed checkpoints. Unset: ``distributed`` if ``train.output_dir`` is a URL,
    otherwise ``full``."""
    async_save: bool = True
    """Save in the background: training stops for a copy in memory only. Takes memory of the size of
    a checkpoint; where there is too little, or on a system other than Linux, training waits."""
    on_save_busy: Literal["wait", "skip"] = "wait"
    """When the last save is still being written: wait for it, or leave this one out. The last step
    is never left out."""
    share_unchanged: bool = True
    """Weights that did not change since the last checkpoint (frozen ones) share its file, by clone
    or hard link. Every checkpoint stays whole when another is deleted."""
    remote_timeout_minutes: float = 10.0
    """Where ``train.output_dir`` is a URL: how long a transfer is tried again while the network or
    the store fails."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """When a save fails (a full disk, say): stop the run, or go on and try at the next save."""

    def __post_init__(self) -> None:
        for name in ("save_steps", "max_shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.save_minutes is not None and self.save_minutes <= 0:
            raise ValueError(f"save_minutes must be positive, got {self.save_minutes}")
        if self.remote_timeout_minutes < 0:
            raise ValueError(
                f"remote_timeout_minutes must not be negative, got {self.remote_timeout_minutes}"
            )
        self.rule()  # which checks its own settings

    @property
    def remote_seconds(self) -> float:
        """How long to try again, in seconds."""
        return 60 * self.remote_timeout_minutes

    def layout_in(self, output_dir: Address | Path) -> Layout:
        """The layout of checkpoints there."""
        return self.layout or ("full" if isinstance(output_dir, Path) else "distributed")

    def rule(self) -> RetentionPolicy:
        """Which checkpoints stay."""
        return RetentionPolicy(
            keep=self.keep,
            keep_every=self.keep_every,
            keep_best=self.keep_best,
            keep_hours=self.keep_hours,
        )
