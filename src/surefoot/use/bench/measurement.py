"""A few optimizer steps of a recipe, measured in this process; nothing is saved.

The first step runs the window with the largest pass of the first epoch, so that the peak of the
memory is the run's, not that of a lucky start. The steps that are timed are the first of the run,
the same examples whatever the settings.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...batch import Window
from ...data.order.loader import Loader
from ...errors import STOP_SIGNALS
from ...model.layers import count_fused
from ...model.loading import device
from ...model.numerics import choose
from ...optim.bf16_weights import rule_of
from ...recipe.recipe import Recipe
from ...run.assembly import build
from ...run.policy import COMPUTED_IN
from ...training.callback import Context, TrainerCallback, TrainerControl, TrainerState
from ...training.trainer import Trainer
from ...training.windows import num_steps
from ..estimate.batches import heaviest
from .clock import Clock, timed
from .hardware import forget_peak, gemm_flops, name_of, peak_memory
from .result import BenchResult

WARM_UP = 2  # steps: the heaviest, which also compiles, and an ordinary one
ENOUGH = 30.0  # seconds of measured steps, after which no more are begun


@dataclass
class Meter(TrainerCallback):
    """Times the steps of a run, records their sizes, and ends it."""

    clock: Clock
    rewind: Callable[[], None] = field(default=lambda: None)  # to the first window of the run
    began: float = 0.0  # when the warm-up was over
    tokens: list[int] = field(default_factory=list)  # of each step, padding not counted
    trained: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # padding counted

    def count(self, window: Window) -> None:
        """Record the size of a window."""
        self.tokens.append(sum(batch.num_tokens for batch in window))
        self.trained.append(sum(batch.num_trained for batch in window))
        self.positions.append(sum(batch.input_ids.numel() for batch in window))

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The model exists; from here on it is about steps."""
        forget_peak(self.clock.device)
        self.clock.turn("data")

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The window exists. A signal ends the run at once, because there is nothing to save."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self.clock.turn("rest")

    def on_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """The weights are updated."""
        self.clock.turn("rest")

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The next step begins, with its window; after the largest one, with the run's first."""
        self.clock.turn("data")
        if state.global_step == 1:
            self.rewind()
        if state.global_step == WARM_UP:
            self.began = time.monotonic()
        elif state.global_step > WARM_UP:
            control.should_training_stop |= time.monotonic() - self.began > ENOUGH


def measure(recipe: Recipe, steps: int, folder: Path) -> BenchResult:
    """The figures of ``steps`` optimizer steps, or fewer if they are slow. ``folder`` stands for
    the run's. Raises as ``surefoot train`` would."""
    where = device()
    meter = Meter(Clock(where))
    around = partial(timed, turn=meter.clock.turn, note=meter.count)
    trainer = build(_short(recipe, steps, folder), callbacks=[meter], trial=around)
    loader = trainer.windows.loader
    meter.rewind = partial(_go_to, loader, 0)
    section = recipe.train
    run_steps = num_steps(section, trainer.windows.steps_per_epoch)
    _go_to(loader, _heaviest_window(loader, run_steps))
    trainer.fit()
    first, *_ = costs = meter.clock.steps()
    measured = costs[WARM_UP:]
    phases = {name: sum(cost[name] for cost in measured) for name in measured[0]}
    memory, tokens = peak_memory(where), sum(meter.tokens[WARM_UP:])
    ordinary, precision = sum(phases.values()) / len(measured), choose(section.precision)
    largest = max(trainer.policy.module.parameters(), key=torch.Tensor.numel)
    return BenchResult(
        device=name_of(where),
        precision=precision,
        run_steps=run_steps,
        steps=len(measured),
        tokens=tokens,
        trained_tokens=sum(meter.trained[WARM_UP:]),
        positions=sum(meter.positions[WARM_UP:]),
        flops=trainer.state.total_flos * tokens / max(1, sum(meter.tokens)),
        gemm_flops=gemm_flops(COMPUTED_IN.get(precision, largest.dtype), where),
        peak_memory=memory,
        compiling_seconds=max(0.0, sum(first.values()) - ordinary) if recipe.model.compile else 0.0,
        phases=phases,
        used=used_by(recipe, trainer),
    )


def _short(recipe: Recipe, steps: int, folder: Path) -> Recipe:
    """The same, over soon and in another folder. What would be streamed is encoded before, as many
    rows as the shuffle looks at."""
    train = replace(recipe.train, output_dir=folder, max_steps=WARM_UP + steps)
    train = replace(train, report_to=(), webhook=None)
    if train.on_nan == "rollback":  # there is nothing to go back to
        train = replace(train, on_nan="stop")
    data = recipe.data
    if data.streaming:
        rows = min(data.max_samples or data.buffer_size, data.buffer_size)
        data = replace(data, streaming=False, max_samples=rows)
    return replace(recipe, train=train, data=data)


def _go_to(loader: Loader, window: int) -> None:
    """Let a window of the first epoch come next."""
    loader.epoch, loader.window = 0, window


def _heaviest_window(loader: Loader, run_steps: int) -> int:
    """The window of the first epoch that has the micro-batch with the most tokens."""
    size = loader.global_batch_size
    order = loader.order.indices(0, 0, run_steps * size)
    lengths = loader.order.examples.lengths_of(np.arange(int(order.max()) + 1))
    items = heaviest(loader, -(-len(order) // size), lengths, np.zeros_like(lengths))
    return int(np.argmax(order == items[0])) // size


def used_by(recipe: Recipe, trainer: Trainer) -> Mapping[str, str]:
    """What a run that is ready uses, of what a recipe can change or a check decides."""
    network = trainer.policy.network
    module, inner = network.module, network.inner
    kernel = trainer.state.kernels.packed_attention if recipe.data.packing else None
    rule = rule_of(trainer.policy.step.optimizer)
    is_fused = all(group.get("fused") for group in rule.param_groups)
    found = {
        "precision": network.options.precision,
        "weights": _dtypes(module),
        "attention": f"{kernel} (packed)" if kernel else str(inner.config._attn_implementation),
        "output head": "full logits of trained positions"
        if network.engine.runner.head is None
        else "chunked cross entropy",
        "optimizer": type(rule).__name__.removeprefix("Fused") + (", fused" if is_fused else ""),
        "compilation": "on" if recipe.model.compile else "off",
    }
    if recipe.model.float8 is not None:
        found["float8"] = recipe.model.float8
    if count := count_fused(module):
        found["LoRA"] = f"fused in {count:,} layers"
    return found


def _dtypes(module: nn.Module) -> str:
    kinds = {
        "trained": {str(p.dtype)[6:] for p in module.parameters() if p.requires_grad},
        "frozen": {str(p.dtype)[6:] for p in module.parameters() if not p.requires_grad},
    }
    return "; ".join(f"{kind}: {', '.join(sorted(of))}" for kind, of in kinds.items() if of)
