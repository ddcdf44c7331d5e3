"""The recipe's ``train`` section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ..errors import RecipeError
from ..extensions import Extended
from ..schema import (
    FREE,
    FROM_HERE,
    OF_EVALUATIONS,
    ROUNDS,
    MayChange,
    Needs,
    Unset,
    UnsetText,
    Variants,
    must,
)
from ..storage.remote import Address, default_cache, is_repository_name

_HALF_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")  # as a path, s3:// has lost a slash

CALLBACKS: Extended[type[Any]] = Extended("callbacks", {})  # dataclasses, each a TrainerCallback
TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow", "swanlab"]
EVALUATES = Needs(("train.eval_steps", "train.eval_minutes", "train.eval_epoch"))
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LENGTH = MayChange("the learning rates follow the new length", is_schedule=True)
_COUNTS = ("max_steps", "log_steps", "eval_steps", "early_stopping_patience")


def _trackers(names: object) -> object:
    """No tracker for ``none``, as in the Hugging Face Trainer."""
    if names in (["none"], None):
        return ()
    return tuple(names) if isinstance(names, list) else names


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How long to train, in what steps, and what to log on the way."""

    output_dir: Annotated[Address | Path, FREE]  # a URL first: any text is a path
    """Folder of the run: checkpoints, ``metrics.jsonl``, ``recipe.yaml``. Relative to the current
    folder; or the URL of a folder in a store (``s3://bucket/run``, ``gs://…``)."""
    cache_dir: Annotated[Path | None, FREE] = None
    """The local folder of runs with a URL; unset, ``surefoot/runs`` in the user's cache folder
    (``XDG_CACHE_HOME``, or ``~/.cache``).
    """
    num_epochs: Annotated[float, _LENGTH, Needs("max_steps", (None,))] = 3.0
    """Passes over the training examples; ``max_steps`` has precedence."""
    max_steps: Annotated[int | None, _LENGTH] = None
    """Optimizer steps to train for."""
    global_batch_size: int = Unset(16)
    """Examples per optimizer step, over all ranks and micro-batches; unset, enlarged if it does not
    divide among the ranks.
    """
    micro_batch_size: Annotated[int | Literal["auto"], ROUNDS] = Unset(4)
    """Examples per micro-batch of one rank, on average: the examples of a step are assigned by
    length, so that all micro-batches are about equally large. Unset, reduced if the global batch
    does not divide. ``auto``: the most that fit in memory according to ``surefoot plan``, chosen
    when the run begins; a resume keeps them.
    """
    seed: int = 42
    """Seed of everything random: data order, dropout, new weights."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of forward and backward. ``auto``: bf16 on a GPU that supports it, otherwise
    fp32.
    """
    deterministic: Annotated[bool, ROUNDS] = True
    """Use only deterministic kernels. With it, a resume on a machine like it is bitwise exact."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    on_nan: Annotated[Literal["stop", "skip", "rollback"], FROM_HERE] = "stop"
    """When a loss or gradient is NaN or infinite: stop, skip the step, or roll back to the
    latest checkpoint and skip the batch. A run that has skipped any ends with exit code 3.
    """
    on_out_of_memory: Annotated[Literal["split", "stop"], FROM_HERE] = "split"
    """When a step does not fit in memory: split it into smaller micro-batches, repeat it and
    continue with that size (on a mesh, all ranks start again with it), or stop.
    """
    max_skipped_steps: Annotated[int, FROM_HERE, Needs("on_nan", ("skip", "rollback"))] = 10
    """With ``on_nan: skip``, stop the run at more skipped steps than this, counted from its
    start."""
    log_steps: Annotated[int | None, FREE] = 10
    """Log every this many steps."""
    log_minutes: Annotated[float | None, FREE] = None
    """Log every this many minutes."""
    log_epoch: Annotated[bool, FREE] = False
    """Log at the end of every epoch."""
    eval_steps: Annotated[int | None, OF_EVALUATIONS] = None
    """Evaluate every this many steps."""
    eval_minutes: Annotated[float | None, OF_EVALUATIONS] = None
    """Evaluate every this many minutes."""
    eval_epoch: Annotated[bool, OF_EVALUATIONS] = False
    """Evaluate at the end of every epoch."""
    metric_for_best_model: Annotated[str, OF_EVALUATIONS, EVALUATES] = UnsetText("eval_loss")
    """Metric by which the best checkpoint is chosen. Unset: ``eval_loss``, or what the stage names:
    ``eval_reward`` of grpo and ppo, whose loss says nothing.
    """
    greater_is_better: Annotated[bool | None, OF_EVALUATIONS, EVALUATES] = None
    """Whether greater values of that metric are better. Unset: as the stage says that makes the
    metric; of one that it does not know, such as your own, it must be set.
    """
    load_best_model_at_end: Annotated[bool, FROM_HERE] = False
    """End with the weights of the best checkpoint; evaluated steps are then always saved."""
    early_stopping_patience: Annotated[int | None, FROM_HERE] = None
    """Stop after this many evaluations without a better metric."""
    early_stopping_threshold: Annotated[float, FROM_HERE, Needs("early_stopping_patience")] = 0.0
    """By how much a metric must be better to count for early stopping."""
    callbacks: tuple[Annotated[object, Variants(CALLBACKS)], ...] = ()
    """Callbacks that installed plugins add, called after those of Surefoot; ``surefoot plugins``
    lists them."""
    extra: Annotated[Mapping[str, Any], FROM_HERE] = field(default_factory=dict, hash=False)
    """Values of your own for callbacks, which read them as ``args.NAME``. Training ignores them; a
    resume takes changed ones from then on."""
    report_to: Annotated[tuple[TrackerName, ...], BeforeValidator(_trackers), FREE] = ()
    """Trackers in addition to ``metrics.jsonl``. ``wandb`` needs
    ``pip install -e '.[wandb]'`` in the clone of Surefoot, and so on; ``none`` is the same as none
    of them.
    """
    report_offline: Annotated[bool, FREE, Needs("report_to")] = False
    """Trackers write files only, and send nothing."""
    project: Annotated[str | None, FREE, Needs("report_to")] = None
    """Project of the run in trackers; unset, what the tracker's own environment variable says
    (``WANDB_PROJECT``, ``MLFLOW_EXPERIMENT_NAME`` …), or surefoot."""
    run_name: Annotated[str | None, FREE] = None
    """Name of the run in trackers and messages; unset, that of its folder."""
    webhook: Annotated[str | None, FREE] = None
    """Name of the environment variable with the URL to which a message is sent when a launch ends
    or fails, when its process dies, and at the first NaN. The URL is a secret, so it is not part of
    a recipe."""

    push_to_hub: Annotated[str | None, FREE] = None
    """Repository on Hugging Face, ``owner/name``, to which the run is uploaded in the background;
    see ``surefoot push``. A failure is reported, and does not stop the run.
    """
    hub_strategy: Annotated[
        Literal["end", "every_save", "all_checkpoints"], FREE, Needs("push_to_hub")
    ] = "end"
    """When to upload: the result at the end of the run; after every save; or after every save with
    all checkpoints and their states.
    """
    hub_private_repo: Annotated[bool, FREE, Needs("push_to_hub")] = True
    """Create that repository as a private one."""

    def __post_init__(self) -> None:
        self._check_places()
        self._check_webhook()
        fixed = [] if self.micro_batch_size == "auto" else ["micro_batch_size"]
        must(self, "be at least 1", "global_batch_size", *fixed)
        if fixed and self.global_batch_size % self.fixed_micro_batch_size:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"micro_batch_size ({self.micro_batch_size})"
            )
        must(self, "be at least 1", *_COUNTS)
        must(self, "not be negative", "max_skipped_steps", "max_grad_norm")
        must(self, "be positive", "log_minutes", "eval_minutes", "num_epochs")

    def _check_places(self) -> None:
        if self.push_to_hub is not None and not is_repository_name(self.push_to_hub):
            raise ValueError(f"push_to_hub: expected owner/name, got {self.push_to_hub!r}")
        if isinstance(self.output_dir, Path) and _HALF_A_URL.match(str(self.output_dir)):
            raise ValueError(
                f"output_dir: {str(self.output_dir)!r} is neither a path nor a complete URL; "
                "expected for example runs/qwen or s3://bucket/run"
            )

    def _check_webhook(self) -> None:
        if self.webhook is not None and not _VARIABLE.fullmatch(self.webhook):
            raise ValueError(  # without the value, which may be a secret
                "webhook: expected the name of an environment variable that has the URL, such as "
                "SUREFOOT_WEBHOOK; a URL is a secret, which a recipe would carry into every "
                "checkpoint"
            )

    @property
    def folder(self) -> Path:
        """The local folder of the run: ``output_dir``, or its folder in the cache."""
        if isinstance(self.output_dir, Path):
            return self.output_dir
        return (self.cache_dir or default_cache()) / self.output_dir.slug

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size // self.fixed_micro_batch_size

    @property
    def fixed_micro_batch_size(self) -> int:
        """The number that ``micro_batch_size`` is. Raises ``RecipeError`` while it is auto."""
        if self.micro_batch_size == "auto":
            raise RecipeError(
                "train.micro_batch_size: auto is chosen by `surefoot train` alone; set a number, "
                "for example the one that `surefoot plan --memory SIZE` prints"
            )
        return int(self.micro_batch_size)  # a plain one, also if nobody has set it

    @property
    def is_greater_better(self) -> bool:
        """Whether greater values of ``metric_for_best_model`` are better; see ``compared``."""
        return bool(self.greater_is_better)
