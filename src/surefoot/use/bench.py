"""How fast a recipe trains on this machine: a few of its own optimizer steps, timed; nothing is
saved.

The measured code is that of ``surefoot train``, with the same ``build`` and the same loop; only
logs, evaluations and saves are omitted. The first step runs the window with the largest pass of the
first epoch, so that the peak of the memory is the run's, not that of a lucky start. The steps that
are timed are the first of the run, the same examples whatever the settings.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..batch import Batch, Hook, Loss, LossFunction, Outputs, Pictures, StepRunner, Window
from ..data.order.loader import Loader
from ..errors import STOP_SIGNALS, RunError
from ..model.loading import device
from ..model.lora_layers import count_fused
from ..model.section import ModelSection
from ..optim.bf16_weights import rule_of
from ..parallel.world import ALONE
from ..recipe.recipe_data import SingleRankRecipe
from ..run.assembly import build
from ..run.policy import COMPUTED_IN
from ..run.training_run import located
from ..storage.memory import allocator_message, is_out_of_memory
from ..training.arguments import Context
from ..training.callback import TrainerCallback, TrainerControl, TrainerState
from ..training.trainer import Trainer
from ..training.windows import num_steps
from .estimate._batches import heaviest

logger = logging.getLogger(__name__)
# Speed depends on the machine, the model and the data together: no rule says which
# micro_batch_size, packing, recomputation or compilation is fastest, a few steps of each do.
# Nothing is searched here: a search tried settings for up to fifteen minutes, each in a process of
# its own, where two commands tell which of two overrides is faster.
WARM_UP = 2  # steps: the heaviest, which also compiles, and an ordinary one
ENOUGH = 30.0  # seconds of measured steps, after which no more are begun


def measure(rank: SingleRankRecipe, steps: int) -> BenchResult:
    """The figures of ``steps`` optimizer steps, or fewer if they are slow. Nothing of them remains
    except the cache of encoded datasets. Raises as ``surefoot train`` would."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        try:
            return _measured(rank, steps, Path(folder))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"the recipe runs out of memory here ({allocator_message(error)}); `surefoot plan "
                "RECIPE --memory SIZE` chooses settings that fit, such as a smaller "
                "train.micro_batch_size"
            ) from error


def _measured(rank: SingleRankRecipe, steps: int, folder: Path) -> BenchResult:
    where = device()
    meter = Meter(Clock(where))
    around = partial(timed, turn=meter.clock.turn, note=meter.count)
    short = located(rank.short(WARM_UP + steps, folder), ALONE)
    trainer = build(short, callbacks=[meter], trial=around)
    loader = trainer.windows.loader
    meter.rewind = partial(_go_to, loader, 0)
    run_steps = num_steps(rank.train, trainer.windows.steps_per_epoch)
    _go_to(loader, _heaviest_window(loader, run_steps))
    trainer.fit()
    first, *_ = costs = meter.clock.steps()
    measured = costs[WARM_UP:]
    phases = {name: sum(cost[name] for cost in measured) for name in measured[0]}
    memory, tokens = peak_memory(where), sum(meter.tokens[WARM_UP:])
    ordinary, precision = (
        sum(phases.values()) / len(measured),
        trainer.policy.network.options.precision,
    )
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
        compiling_seconds=max(0.0, sum(first.values()) - ordinary) if rank.model.compile else 0.0,
        phases=phases,
        used=used_by(rank.model, trainer),
    )


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
            signal.signal(number, signal.default_int_handler)  # so that the folder is removed
        self.clock.turn("rest")

    def on_optimizer_step(
        self, args: Context, state: TrainerState, control: TrainerControl
    ) -> None:
        """The weights are updated."""
        self.clock.turn("rest")

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The next step begins, with its window; after the largest one, with the run's first."""
        self.clock.turn("data")
        logger.info("step %d is done", state.global_step)  # a slow machine is not silent
        if state.global_step == 1:
            self.rewind()
        if state.global_step == WARM_UP:
            self.began = time.monotonic()
        elif state.global_step > WARM_UP:
            control.should_training_stop |= time.monotonic() - self.began > ENOUGH


def used_by(section: ModelSection, trainer: Trainer) -> Mapping[str, str]:
    """What a run that is ready uses, of what a recipe can change or a check decides."""
    network = trainer.policy.network
    module, inner = network.module, network.inner
    kernel = trainer.state.kernels.packed_attention if network.options.packing else None
    rule = rule_of(trainer.policy.step.optimizer)
    is_fused = all(group.get("fused") for group in rule.param_groups)
    settings = {
        "precision": network.options.precision,
        "weights": _dtypes(module),
        "attention": f"{kernel} (packed)" if kernel else str(inner.config._attn_implementation),
        "output head": "full logits of trained positions"
        if network.engine.runner.head is None
        else "chunked cross entropy",
        "optimizer": type(rule).__name__.removeprefix("Fused") + (", fused" if is_fused else ""),
        "compilation": "on" if section.compile else "off",
    }
    if section.float8 is not None:
        settings["float8"] = section.float8
    if count := count_fused(module):
        settings["LoRA"] = f"fused in {count:,} layers"
    return settings


def _dtypes(module: nn.Module) -> str:
    kinds = {
        "trained": {str(p.dtype)[6:] for p in module.parameters() if p.requires_grad},
        "frozen": {str(p.dtype)[6:] for p in module.parameters() if not p.requires_grad},
    }
    return "; ".join(f"{kind}: {', '.join(sorted(of))}" for kind, of in kinds.items() if of)


@dataclass(frozen=True)
class BenchResult:
    """Of some optimizer steps; sums are over all of them."""

    device: str
    precision: str
    run_steps: int  # of the whole run
    steps: int  # that were timed
    tokens: int  # padding not counted
    trained_tokens: int
    positions: int  # tokens, padding counted
    flops: float  # of the model, as ``total_flos`` counts them
    gemm_flops: float  # a second: what a product of matrices of this type reaches here
    peak_memory: int  # bytes
    compiling_seconds: float  # by which the first step was longer, if ``model.compile`` is on
    phases: Mapping[str, float]  # seconds
    used: Mapping[str, str] = field(default_factory=dict)  # kernels, dtypes, what a check decided

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self.phases.values())

    @property
    def step_seconds(self) -> float:
        """Of one step, in the mean."""
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Read."""
        return self.tokens / self.seconds

    @property
    def trained_tokens_per_second(self) -> float:
        """Learnt."""
        return self.trained_tokens / self.seconds

    @property
    def padding(self) -> float:
        """Share of the positions that hold no token."""
        return 1 - self.tokens / self.positions

    @property
    def utilisation(self) -> float:
        """Model FLOPs a second, as a share of what the hardware reaches."""
        return self.flops / self.seconds / self.gemm_flops

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, by phase."""
        return {name: spent / self.seconds for name, spent in self.phases.items()}

    def as_data(self, single_rank: SingleRankRecipe) -> dict[str, object]:
        """All figures, in bytes, tokens and seconds, as ``surefoot bench --json`` prints them."""
        return {
            "num_processes": single_rank.num_processes,
            "measured_processes": 1,
            "examples_a_step": single_rank.train.global_batch_size,
            "tokens_per_second": self.tokens_per_second,
            "trained_tokens_per_second": self.trained_tokens_per_second,
            "step_seconds": self.step_seconds,
            "utilisation": self.utilisation,
            "padding": self.padding,
            "shares": self.shares,
            **asdict(self),
        }


PHASES = ("data", "forward", "backward", "optimizer", "rest")  # a step begins with its data

Mark = float | torch.cuda.Event  # seconds, or a place in the queue of a GPU


@dataclass
class Clock:
    """Records when phases begin."""

    device: torch.device
    _begun: list[tuple[str, Mark]] = field(default_factory=list)

    def turn(self, phase: str) -> None:
        """``phase`` begins, and the one before ends."""
        if self.device.type != "cuda":
            self._begun.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._begun.append((phase, event))

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each phase, step by step; the last phase is not complete and not counted."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        first = self._begun[0][1]
        return split([(phase, _since(first, mark)) for phase, mark in self._begun])


def _since(first: Mark, mark: Mark) -> float:
    if isinstance(first, float) and isinstance(mark, float):
        return mark - first
    assert not isinstance(first, float)
    assert not isinstance(mark, float)
    return float(first.elapsed_time(mark)) / 1000


def split(begun: Sequence[tuple[str, float]]) -> list[dict[str, float]]:
    """Seconds of each phase, step by step, of the times at which phases began."""
    steps: list[dict[str, float]] = []
    before = ""
    for (phase, start), (_, end) in pairwise(begun):
        if phase == "data" and before != "forward":  # which waits for the pictures of its batch
            steps.append(dict.fromkeys(PHASES, 0.0))
        steps[-1][phase] += end - start
        before = phase
    return steps


@dataclass(frozen=True)
class _TimedPictures:
    """Pictures of a batch, whose reading is a wait for data."""

    pictures: Pictures
    turn: Callable[[str], None]

    def read(self, batch: Batch) -> Batch:
        """``batch`` with what the model gets of them."""
        self.turn("data")
        read = self.pictures.read(batch)
        self.turn("forward")
        return read


def timed(
    run_window: StepRunner, turn: Callable[[str], None], note: Callable[[Window], None]
) -> StepRunner:
    """``run_window`` that records when forward and backward begin. A forward pass ends with its
    loss, a backward pass with its micro-batch; what follows the window, normalizing and clipping
    the gradient, belongs to the optimizer."""

    def run(window: Window, loss_of: LossFunction, *, before: Hook, after: Hook) -> list[Loss]:
        def begin(index: int) -> None:
            before(index)
            turn("forward")

        def timed_loss(outputs: Outputs, batch: Batch) -> Loss:
            loss = loss_of(outputs, batch)
            turn("backward")
            return loss

        def end(index: int) -> None:
            turn("rest")
            after(index)

        note(window)
        window = [
            batch
            if batch.pictures is None
            else replace(batch, pictures=_TimedPictures(batch.pictures, turn))
            for batch in window
        ]
        losses = run_window(window, timed_loss, before=begin, after=end)
        turn("optimizer")
        return losses

    return run


_SIZES = {"cpu": 1024, "cuda": 8192}  # of square matrices: large enough to keep all units busy
_SECONDS = 0.5
_FEWEST = 3  # products
_PROCESS = Path("/proc/self")


def gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The most operations per second that a product of two matrices reaches on this device. Values
    are random, as a GPU multiplies ones faster than it ever multiplies weights."""
    size, draws = _SIZES[device.type], torch.Generator(device).manual_seed(0)  # not the run's own
    a, b = (torch.randn(size, size, generator=draws, dtype=dtype, device=device) for _ in range(2))
    best = _product(a, b)  # also loads the kernel
    began, count = time.perf_counter(), 0
    # One product is enough where it takes seconds: bfloat16 on a CPU without units for it.
    while best < _SECONDS and (count < _FEWEST or time.perf_counter() - began < _SECONDS):
        best, count = min(best, _product(a, b)), count + 1
    return 2.0 * size**3 / best


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Seconds of one product."""
    is_gpu = a.device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(a.device)
    start = time.perf_counter()
    a @ b
    if is_gpu:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - start


def forget_peak(device: torch.device) -> None:
    """Start to measure the peak memory, where the system supports it (Linux, GPUs)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: on the GPU, that of its allocator; otherwise RSS."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def name_of(device: torch.device) -> str:
    """The name of the device, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
