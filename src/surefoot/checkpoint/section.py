"""The recipe's ``checkpoint`` section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..schema import Needs
from ..storage.remote import Address
from .disk.manifest import Layout
from .disk.retention import RetentionPolicy

EVALUATES = Needs(("train.eval_steps", "train.eval_minutes", "train.eval_epoch"))


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, what to keep, and what to resume from. The last step is always saved."""

    save_steps: int | None = 200
    """Save every this many steps."""
    save_minutes: float | Literal["auto"] | None = None
    """Save every this many minutes. ``auto``: as often as loses the least time to saves and
    failures, by what a save and a start take in this run (Young and Daly), 1 to 60 minutes; usual
    with ``save_steps: null``. ``surefoot plan --nodes N`` shows what that comes to.
    """
    save_epoch: bool = False
    """Save at the end of every epoch."""
    keep: int | None = 3
    """How many of the latest checkpoints to keep, in addition to the best one; unset, all."""
    keep_every: Annotated[int | None, Needs("keep")] = None
    """Also keep checkpoints whose step is a multiple of this, permanently."""
    keep_best: Annotated[int | None, EVALUATES] = None
    """How many of the best checkpoints by ``train.metric_for_best_model`` to keep; unset, one."""
    keep_hours: Annotated[float | None, Needs("keep")] = None
    """Also keep checkpoints saved within this many hours before the latest."""
    resume: str = "auto"
    """``auto``: the latest valid checkpoint (an error if there are some and none is valid);
    ``none``: start from scratch; or a folder of Surefoot, of Hugging Face's Trainer, or of
    MindSpore Transformers.
    """
    max_shard_size: int = 5_000_000_000
    """Largest weight file in bytes; bigger models are split as Hugging Face splits them."""
    layout: Layout | None = None
    """``full``: unsharded tensors in files that Hugging Face's libraries and PyTorch open
    directly, also with several ranks; ``distributed``: a folder for every rank, for object
    stores and for PyTorch's distributed checkpoints. Unset: ``distributed`` if
    ``train.output_dir`` is a URL, otherwise ``full``.
    """
    async_save: bool = True
    """Save asynchronously: training stops for a copy in memory only. Takes as much memory as a
    checkpoint has bytes; if there is too little, or on a system other than Linux, training
    waits.
    """
    on_save_busy: Annotated[Literal["wait", "skip"], Needs("async_save", (True,))] = "wait"
    """If the last save is still being written: wait for it, or skip this one. The last step is
    never skipped.
    """
    share_unchanged: bool = True
    """Weights that did not change since the last checkpoint (frozen ones) share its file, by
    clone or hard link. Every checkpoint stays complete if another is deleted. Every so often they
    are written again, so that damage to one file is not damage to all kept checkpoints: with
    ``keep: 3`` every second time, with ``keep: 2`` every time.
    """
    remote_timeout_minutes: Annotated[float, Needs("train.output_dir", (Address,))] = 10.0
    """If ``train.output_dir`` is a URL: how long a transfer is retried while the network or the
    store fails.
    """
    on_save_error: Literal["stop", "continue"] = "stop"
    """If a save fails (a full disk, for example): stop the run, or continue and try at the next
    save.
    """

    def __post_init__(self) -> None:
        for name in ("save_steps", "max_shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if isinstance(self.save_minutes, (int, float)) and self.save_minutes <= 0:
            raise ValueError(f"save_minutes must be positive, got {self.save_minutes}")
        if self.remote_timeout_minutes < 0:
            raise ValueError(
                f"remote_timeout_minutes must not be negative, got {self.remote_timeout_minutes}"
            )
        self.rule()  # which checks its own settings

    @property
    def remote_seconds(self) -> float:
        """How long to retry, in seconds."""
        return 60 * self.remote_timeout_minutes

    def layout_in(self, output_dir: Address | Path) -> Layout:
        """The layout of checkpoints in that folder."""
        return self.layout or ("full" if isinstance(output_dir, Path) else "distributed")

    def rule(self) -> RetentionPolicy:
        """The retention policy."""
        return RetentionPolicy(
            keep=self.keep,
            keep_every=self.keep_every,
            keep_best=self.keep_best,
            keep_hours=self.keep_hours,
        )
