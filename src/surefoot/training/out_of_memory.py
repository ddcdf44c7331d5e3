"""Out of memory: the same work again in smaller pieces.

The step that ran out of memory has changed nothing yet, so it is repeated with smaller
micro-batches, and is then the step of a run that had them from the start. Every lowered size is
stored in checkpoints and in a file of the run, so a step that is repeated after a crash has the
size that it had before.

On a mesh whose ranks meet in collectives inside a pass, the other ranks wait for the one that ran
out of memory. That one writes the smaller size down and ends; the next launch begins with it.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ..data.order.micro_batches import fitting_micro_batch
from ..errors import OutOfMemoryError, RunError, counted
from ..generate.section import GenerateSection
from ..model.numerics import return_freed_memory
from ..parallel.world import ALONE, AgreedShortageError, World
from ..storage import files
from ..storage.memory import allocator_message, is_out_of_memory
from .callback import FittedSizes
from .section import TrainSection

logger = logging.getLogger(__name__)
T = TypeVar("T")
FILE = "fitted_sizes.json"  # in the folder of the run
_LIMIT = 1 << 20  # bytes of it
_LESS = (
    "model.gradient_checkpointing: full (or offload), or train on more ranks (parallel.dp_shard)"
)


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed."""

    message: str  # the allocator's
    is_agreed: bool  # whether all ranks have stopped at the same place for it


def run_or_shortage(work: Callable[[], T]) -> T | Shortage:
    """The result of ``work``, or the allocation that failed in it. The traceback, whose frames hold
    the tensors of the pass, is freed on return."""
    try:
        return work()
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return Shortage(allocator_message(error), isinstance(error, AgreedShortageError))


@dataclass
class MemoryGuard:
    """The sizes of a run's batches, which are lowered when memory does not suffice."""

    recipe_size: int  # train.micro_batch_size
    num_examples: int  # of an optimizer step on one rank
    _: KW_ONLY
    world: World = ALONE
    can_split: bool = True  # train.on_out_of_memory
    folder: Path | None = None  # of the run
    sizes: FittedSizes = field(default_factory=FittedSizes)
    step: int = 0  # that is being trained

    @classmethod
    def of(cls, section: TrainSection, world: World = ALONE) -> MemoryGuard:
        """That of a recipe, without a folder to write to."""
        count = max(1, section.global_batch_size // world.num_data_ranks)
        can_split = section.on_out_of_memory == "split"
        return cls(section.fixed_micro_batch_size, count, world=world, can_split=can_split)

    @property
    def micro_batch_size(self) -> int:
        """Examples per micro-batch of the step that is being trained."""
        if not self.can_split:
            return self.recipe_size
        # By step, not the newest: a step that is repeated after a crash has the size it had first,
        # and so its bits.
        lowered = [size for first, size, _ in self.sizes.micro_batch_size if first <= self.step]
        return fitting_micro_batch(self.num_examples, lowered[-1]) if lowered else self.recipe_size

    @property
    def forward_size(self) -> int:
        """Examples of a forward pass without gradients."""
        return min(self.micro_batch_size, self.sizes.forward or self.micro_batch_size)

    def train(
        self,
        work: Callable[[], T],
        again: Callable[[], T],
        *,
        clean: Callable[[], None],
        place: Callable[[], str],
    ) -> T:
        """The result of ``work`` of a step; while it runs out of memory, that of ``again`` with a
        smaller ``micro_batch_size``.

        Args:
            work: forward and backward of a window; raises if memory does not suffice.
            again: the same for the same examples, with the size of now.
            clean: frees what a pass that failed has left, such as gradients.
            place: the rows of the micro-batch that ran out of memory, for messages.

        Raises:
            RunError: a single example does not fit.
            OutOfMemoryError: other ranks are in a collective; the next launch has the smaller size.
        """
        if not self.can_split:
            return work()
        result = run_or_shortage(work)
        while isinstance(result, Shortage):
            clean()
            free()
            self._lower_training(result, place)
            result = run_or_shortage(again)
        return result

    def forward(self, work: Callable[[int], T]) -> T:
        """The result of ``work``, forward passes without gradients of so many examples each; from
        the start with fewer, while it runs out of memory."""
        if not self.can_split:
            return work(self.forward_size)
        while isinstance(result := run_or_shortage(lambda: work(self.forward_size)), Shortage):
            free()
            size = self._smaller(self.forward_size, result, "an evaluation or a reference model")
            self.sizes.forward = size
            what = f"forward passes without gradients have {counted(size, 'example')} from now on"
            self._continue(result, what, f"train.micro_batch_size={size}")
        return result

    def generate(self, section: GenerateSection, work: Callable[[GenerateSection], T]) -> T:
        """The result of ``work`` with ``section``; with a smaller ``batch_size``, while it runs out
        of memory. The samples do not depend on it."""
        if not self.can_split:
            return work(section)
        while True:
            size = min(section.batch_size, self.sizes.generate or section.batch_size)
            fitted = replace(section, batch_size=size)
            result = run_or_shortage(lambda fitted=fitted: work(fitted))  # type: ignore[misc]
            if not isinstance(result, Shortage):
                return result
            free()
            self.sizes.generate = self._smaller(size, result, "sampling")
            setting = f"generate.batch_size={self.sizes.generate}"
            self._continue(result, f"sampling continues with {setting}", setting)

    def recall(self, step: int) -> None:
        """Read the sizes of earlier launches, after the state of a checkpoint at ``step``. From
        there on, a size of the recipe that is another one since takes their place. A collective
        call."""
        self.step = step
        earlier = self.world.from_main(_read(self.folder) if self.world.is_main else None)
        # The file is written at once, the checkpoint later: whichever knows more changes is the
        # newer one.
        if earlier is not None and earlier.num_changes >= self.sizes.num_changes:
            self.sizes.load_state_dict(earlier.state_dict())
        changes = self.sizes.micro_batch_size
        is_kept = self.can_split and (not changes or changes[-1][2] == self.recipe_size)
        if changes and not is_kept:
            changes[:] = [each for each in changes if each[0] <= self.step]
            changes.append((self.step + 1, self.recipe_size, self.recipe_size))
            self.sizes.forward = None
        elif changes and changes[-1][1] != self.recipe_size:
            first, size, _ = changes[-1]
            logger.warning(
                "micro-batches have %s from step %d on, as memory did not suffice for "
                "train.micro_batch_size=%d; set %d in the recipe, or another size to try that",
                counted(size, "example"),
                first,
                self.recipe_size,
                size,
            )

    def _lower_training(self, shortage: Shortage, place: Callable[[], str]) -> None:
        size = self.micro_batch_size
        if size == 1:
            raise RunError(
                f"data.cutoff_len: step {self.step} ran out of memory ({shortage.message}) with "
                f"micro-batches of one example: {place()}. Lower data.cutoff_len, set {_LESS}; "
                "then run the same command to resume"
            )
        smaller = fitting_micro_batch(self.num_examples, size // 2)
        self.sizes.micro_batch_size.append((self.step, smaller, self.recipe_size))
        examples = counted(smaller, "example")
        what = f"step {self.step} is repeated with micro-batches of {examples} instead of {size}"
        self._continue(shortage, what, f"train.micro_batch_size={smaller}")

    def _smaller(self, size: int, shortage: Shortage, what: str) -> int:
        if size > 1:
            return size // 2
        raise RunError(
            f"data.cutoff_len: {what} ran out of memory ({shortage.message}) with one example at a "
            f"time. Lower data.cutoff_len (or generate.max_new_tokens), or set {_LESS}"
        )

    def _continue(self, shortage: Shortage, what: str, cure: str) -> None:
        """Write the sizes down and log it; raise ``OutOfMemoryError`` if other ranks wait."""
        # Other ranks stand in a collective and cannot be told: this one ends, and the launcher
        # starts all of them again (docs/decisions/0047).
        is_alone = self.world.size == 1 or shortage.is_agreed
        if self.world.is_main or not is_alone:
            self._write(insist=not is_alone)
        if is_alone:
            logger.warning("out of memory (%s): %s; set %s", shortage.message, what, cure)
            return
        raise OutOfMemoryError(
            f"rank {self.world.rank} ran out of memory ({shortage.message}) while other ranks wait "
            f"for it. All ranks start again from the latest checkpoint: {what}. If your launcher "
            f"does not restart them, run the same command to resume, or set {cure}"
        )

    def _write(self, *, insist: bool) -> None:
        """Write the sizes into the folder of the run. Without the file, a later launch finds out
        again what does not fit, so only a restart must have it."""
        if self.folder is None:
            return
        text = json.dumps(self.sizes.state_dict()) + "\n"
        try:
            with files.raising(RunError, FILE):
                files.make_folder(self.folder)
                files.write_aside(self.folder / FILE, text.encode())
        except RunError as error:
            if insist:
                raise
            logger.warning("%s", error)


def free() -> None:
    """Return what a failed pass has left to the device and the system."""
    gc.collect()  # graphs may be cycles
    return_freed_memory()


def _read(folder: Path | None) -> FittedSizes | None:
    """The sizes that an earlier launch wrote down."""
    if folder is None:
        return None
    try:
        with files.open_file(folder / FILE) as file:
            state = files.parse_json(files.read_all(file, _LIMIT))
        sizes = FittedSizes()
        sizes.load_state_dict(state)
    except (OSError, ValueError, TypeError, AttributeError):  # none, cut off, another program's
        return None  # the step fails again, and they are found again
    return sizes
