"""Windows of examples in an order that is a pure function of (seed, epoch), and their
micro-batches.

The data position is two integers, the epoch and the window in it. So a resume skips nothing, and
the examples of step k are the same for any number of ranks, any micro-batch size and any progress
of encoding.

The examples of an epoch come in blocks, each permuted by itself (``Shuffle``). A complete dataset
is one block, all of it; data that is still being encoded has blocks of one size. A shuffle buffer
would have to be saved, or filled again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import TypeVar, overload

import numpy as np
import torch

from ...batch import Batch, Features, Window
from ...errors import DataError
from ..data_order import Description, Index, draw, permutation
from ..store.dataset import EncodedDataset, ExampleStream
from .micro_batches import Batching, check_divides

_RESTORE = (
    "restore what they are made from: the rows of its datasets and their pictures, the tokenizer "
    "and the chat template"
)
NAMES = {
    "streaming": "data.streaming",
    "length": "the number of examples",
    "seed": "train.seed",
    "global_batch_size": "train.global_batch_size",
    "shuffle": "data.shuffle",
    "dataset": "the fingerprint of the encoded examples",
    "buffer_size": "data.buffer_size",
    "held": "the number of examples that data.val_size holds out",
    "content": "the fingerprint of the examples seen so far",
}
KEYS = ("epoch", "window", "shards", *NAMES)  # of a state, in the order in which files have them
Position = tuple[int, int]  # epoch, and index in it
Made = TypeVar("Made")


@dataclass(frozen=True)
class Omitted:
    """Items that nothing is learned of, and what stands in the place of each."""

    items: AbstractSet[int]
    without: Callable[[Features], Features]


@dataclass(frozen=True, eq=False)
class WindowExamples(Sequence[Features]):
    """The examples of one global window; each is read from its store when it is used."""

    source: EncodedDataset | ExampleStream
    items: Index
    omitted: Omitted | None = None

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Features: ...

    @overload
    def __getitem__(self, index: slice) -> WindowExamples: ...

    def __getitem__(self, index: int | slice) -> Features | WindowExamples:
        if isinstance(index, slice):
            return replace(self, items=self.items[index])
        item = int(self.items[index])
        features, omitted = self.source[item], self.omitted
        if omitted is None or item not in omitted.items:
            return features
        return omitted.without(features)

    @cached_property
    def lengths(self) -> Index:
        """[examples] tokens of each."""
        return self.source.lengths_of(self.items)


Loaded = tuple[WindowExamples, Window | None]  # the window if it was prefetched


@dataclass
class Loader:
    """Endless windows. Every example occurs once per epoch; the last window of an epoch has the
    remaining examples.

    ``next_examples`` gives the examples of the next global window, the same on every rank. ``deal``
    gives this rank's micro-batches of them, or of what a stage made of them. ``next_window`` does
    both.
    """

    order: Shuffle
    batching: Batching
    _: KW_ONLY
    global_batch_size: int
    prefetch: Prefetch | None = None  # makes the next window ahead, if its examples are there
    epoch: int = field(default=0, init=False)  # of the next window
    window: int = field(default=0, init=False)  # the next one, counted from 0 in each epoch
    _loaded: Loaded | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        batching = self.batching
        check_divides(self.global_batch_size, batching.micro_batch_size, batching.world_size)

    @property
    def shuffle(self) -> bool:
        """Whether the order of examples differs from that of the data."""
        return self.order.shuffle

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch, if that is known."""
        return self.order.num_examples

    @property
    def steps_per_epoch(self) -> int | None:
        """Windows in an epoch, if that is known."""
        count = self.num_examples
        return None if count is None else -(-count // self.global_batch_size)

    @property
    def progress(self) -> float:
        """Completed epochs, with a fraction. Without one in the first epoch of a stream: its
        length depends on the progress of encoding, and an interrupted run must report the same
        as one that was not."""
        steps = self.steps_per_epoch if self.epoch or self.order.is_complete else None
        return self.epoch + (self.window / steps if steps else 0.0)

    def next_examples(self) -> Sequence[Features]:
        """The next global window's examples, the same on every rank; advances the position."""
        at, ahead = (self.epoch, self.window), self.prefetch
        prefetched = None if ahead is None else ahead.take(at)
        self._loaded = (examples := self.examples_at(*at)), prefetched
        self.skip()
        return examples

    def deal(self, examples: Sequence[Features]) -> Window:
        """This rank's micro-batches of a global window's examples. Those of ``next_examples`` were
        prefetched; then the next ones are started."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded[0] is not examples:
            if isinstance(examples, WindowExamples):
                return self._ready(self._window(examples))
            return self._ready(self.batching.window(examples))
        window = self._ready(self._window(loaded[0])) if loaded[1] is None else loaded[1]
        last = (self.window + 1) * self.global_batch_size - 1
        # Only the main thread may wait for examples: the encoder that it starts ends with the
        # thread that started it.
        if self.prefetch is not None and self.order.is_ready(self.epoch, last):
            self.prefetch.begin((self.epoch, self.window), self.window_at)
        return window

    def resize(self, micro_batch_size: int) -> None:
        """Deal micro-batches of another size from here on, also from the window that is loaded."""
        if micro_batch_size == self.batching.micro_batch_size:
            return
        self.batching = replace(self.batching, micro_batch_size=micro_batch_size)
        if self._loaded is not None:
            self._loaded = self._loaded[0], None
        if self.prefetch is not None:
            self.prefetch.forget()

    def next_window(self) -> Window:
        """This rank's micro-batches of the next global window; advances the position."""
        at = self.epoch, self.window
        try:
            return self.deal(self.next_examples())
        except BaseException:
            self.epoch, self.window = at
            raise

    def examples_at(self, epoch: int, window: int) -> WindowExamples:
        """The examples of any global window; waits for them."""
        start = window * self.global_batch_size
        items = self.order.indices(epoch, start, start + self.global_batch_size)
        if not len(items):
            raise DataError(f"the data ends before window {window} of epoch {epoch + 1}")
        return WindowExamples(self.order.examples, items)

    def heaviest(self, most: int = 1000) -> tuple[int, int]:
        """The window of the first epoch with the most tokens in one micro-batch, among up to
        ``most`` of those whose examples are known."""
        size, best, position = self.global_batch_size, -1, (0, 0)
        for window in range(min(most, self.order.reach(most * size) // size)):
            lengths = self.examples_at(0, window).lengths
            heaviest = self.batching.most_positions(lengths)
            if heaviest > best:
                best, position = heaviest, (0, window)
        return position

    def window_at(self, epoch: int, window: int) -> Window:
        """This rank's micro-batches of any global window; waits for them."""
        return self._window(self.examples_at(epoch, window))

    def skip(self) -> None:
        """Skip the next window."""
        self.window += 1
        end = self.window * self.global_batch_size
        if self.order.reach(end + 1) <= end:
            self.epoch, self.window = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int | str | bool]:
        """The data position, and the settings on which it depends."""
        order = self.order.describe(self.epoch, self.window * self.global_batch_size)
        values = {**self._own, **order, "epoch": self.epoch, "window": self.window}
        return {name: values[name] for name in KEYS if name in values}

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Go to a saved position; raises DataError if it belongs to other data or another order.

        Waits until all examples before it are encoded, unless they are in the cache.
        """
        here = {"streaming": False, **self._own, **self.order.describe_like(state)}
        saved = {"streaming": "shards" in state, **state}
        for name, what in NAMES.items():
            if name in here and saved.get(name) != here[name]:
                is_setting = " " not in what
                cure = f"set {what} back" if is_setting else _RESTORE
                raise DataError(
                    f"cannot resume mid-epoch: {what} was {saved.get(name)} in the checkpoint "
                    f"and is {here[name]} now; {cure}, or start a new run from its weights in "
                    "another train.output_dir (model.path, or model.adapter for an adapter)"
                )
        self.epoch, self.window = int(state["epoch"]), int(state["window"])

    @property
    def _own(self) -> Description:
        return {"global_batch_size": int(self.global_batch_size)}

    def _window(self, examples: WindowExamples) -> Window:
        return self.batching.window(examples, lengths=examples.lengths, spares=examples.source)

    def _ready(self, window: Window) -> Window:
        return window if self.prefetch is None else self.prefetch.ready(window)


@dataclass
class Prefetch:
    """Builds one window ahead, in a thread, while the step runs on this one.

    A window is a function of its position, so the thread only changes when it is built. A window
    that is requested out of order (after a skip, a resume, a rollback) is built on the spot, and
    the loader's position stays that of the window in use. An error is raised where the window is
    used. Each window has its own thread, which ends with it, so there is nothing to close.
    """

    ready: Callable[[Window], Window]  # what is done to a window before it is needed
    _running: tuple[Position, Future[Window]] | None = field(default=None, init=False, repr=False)

    def begin(self, at: Position, make: Callable[[int, int], Window]) -> None:
        """Start a thread that builds the window at ``at``."""
        self._running = at, _in_thread("prefetch", lambda: self.ready(make(*at)))

    def forget(self) -> None:
        """Drop the window that is being built."""
        self._running = None

    def take(self, at: Position) -> Window | None:
        """The window at ``at``, if that is what was made ahead. Raises what ``make`` did."""
        running, self._running = self._running, None
        return running[1].result() if running is not None and running[0] == at else None


def for_device(where: torch.device) -> Prefetch | None:
    """Prefetched windows for a GPU, in pinned memory. None for a CPU: there the thread competes
    with the step, which costs 6 ms per window to save 1 ms."""
    if where.type != "cuda":
        return None

    def pinned(batch: Batch) -> Batch:
        with torch.cuda.device(where):  # each thread has a current one, and this is a new thread
            return batch.located().pinned()

    reader = PictureReader(pinned)
    return Prefetch(lambda window: reader.queued([pinned(batch) for batch in window]))


@dataclass
class PictureReader:
    """Reads the pictures of micro-batches a few ahead, in threads, in the order of their use.

    What is read follows from the micro-batch, so the threads only change when. A micro-batch whose
    turn has not come, because others were skipped, is read where it is used. An error is raised
    there, too. Each micro-batch has its own thread, which ends with it: Pillow and numpy let others
    run meanwhile.
    """

    ready: Callable[[Batch], Batch]  # what is done to a micro-batch before it is needed
    ahead: int = 2  # micro-batches: one is read while one computes, and one may be slow
    _queue: deque[_QueuedPictures] = field(default_factory=deque, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def queued(self, window: Window) -> Window:
        """The same micro-batches; the first of them are read from now on."""
        queued = [
            batch
            if batch.pictures is None
            else replace(batch, pictures=_QueuedPictures(self, batch))
            for batch in window
        ]
        with self._lock:
            self._queue += [p for b in queued if isinstance(p := b.pictures, _QueuedPictures)]
            self._begin()
        return queued

    def take(self, pictures: _QueuedPictures) -> Batch:
        """The micro-batch that was read, and is forgotten here."""
        with self._lock:
            future, pictures.future = pictures.future, None
            if pictures in self._queue:
                while self._queue.popleft() is not pictures:  # those before it were skipped
                    pass
            self._begin()
        return self._read(pictures.batch) if future is None else future.result()

    def _begin(self) -> None:
        """Read those whose turn it is."""
        for pictures in islice(self._queue, self.ahead):
            if pictures.future is None:
                pictures.future = _in_thread("pictures", partial(self._read, pictures.batch))

    def _read(self, batch: Batch) -> Batch:
        return self.ready(batch.read())


@dataclass(eq=False)
class _QueuedPictures:
    """The pictures of a micro-batch in the queue of its reader."""

    reader: PictureReader
    batch: Batch
    future: Future[Batch] | None = None

    def read(self, batch: Batch) -> Batch:
        """``batch`` with what the model gets of them."""
        read = self.reader.take(self)
        return replace(batch, pictures=None, media=read.media, axes=read.axes)


def _in_thread(name: str, make: Callable[[], Made]) -> Future[Made]:
    """What ``make`` returns, computed in a thread of its own; an error is raised where the result
    is used. The thread ends with it, so there is nothing to close."""
    future: Future[Made] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"surefoot-{name}", daemon=True).start()
    return future


EPOCHS = 1 << 40  # streams of random numbers of one epoch
NOTHING = np.empty(0, np.int64)


@dataclass
class Shuffle:
    """Blocks of ``buffer_size`` examples; None: all of a complete dataset. From the second epoch
    on, the first block of an epoch is shorter, so that an example shares its block with other
    examples in each.

    The order is a pure function of (seed, epoch, position), whatever has been encoded so far, so a
    position is all that a resume needs.

    Examples that are ``held_out`` are never drawn, and positions do not count them.
    """

    examples: EncodedDataset | ExampleStream
    seed: int
    shuffle: bool = True
    buffer_size: int | None = None
    held_out: Index = field(default_factory=lambda: NOTHING)  # ascending
    _newest: tuple[tuple[int, int, int], Index] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.is_complete and not self.examples.length:
            raise DataError("there are no examples to load")

    @property
    def is_complete(self) -> bool:
        """Whether all examples are known from the beginning."""
        return self.buffer_size is None

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch, if all of them are encoded."""
        length = self.examples.length
        return None if length is None else length - len(self.held_out)

    def indices(self, epoch: int, start: int, end: int) -> Index:
        """The examples at positions from ``start`` to ``end``, once encoded; fewer at the end."""
        if not self.shuffle:
            return self._numbers(np.arange(start, max(start, min(end, self.reach(end)))))
        block_slices, position = [NOTHING], start
        while position < end:
            first, last = self._block(epoch, position)
            last = min(last, self.reach(last))
            if position >= last:
                break
            block = self._permutation(epoch, first, last)
            block_slices.append(block[position - first : end - first])
            position += len(block_slices[-1])
        return self._numbers(np.concatenate(block_slices))

    def reach(self, count: int) -> int:
        """Wait for ``count`` examples, or for the end of the data; returns how many are known."""
        num_held_out = len(self.held_out)
        return max(0, self.examples.reach(count + num_held_out) - num_held_out)

    def is_ready(self, epoch: int, last: int) -> bool:
        """Whether the examples up to the position ``last`` can be drawn without waiting."""
        return self.examples.has(self._block(epoch, last)[1] + len(self.held_out))

    def describe(self, epoch: int, position: int) -> Description:
        """What the examples before a position depend on; ``shards``: from how many they come."""
        if self.is_complete:
            return self.describe_like({})
        shards = self._shards_before(epoch, position)
        return {"shards": shards, **self.describe_like({"shards": shards})}

    def describe_like(self, saved: Description) -> Description:
        """The same of this order, once as many shards as were saved are encoded."""
        examples_description = self.examples.describe(int(saved.get("shards", 0)))
        how: Description = {"seed": self.seed, "shuffle": self.shuffle, **examples_description}
        if self.buffer_size is None:
            return how
        num_held_out = len(self.held_out)
        return {**how, "streaming": True, "buffer_size": self.buffer_size, "held": num_held_out}

    def _block(self, epoch: int, position: int) -> tuple[int, int]:
        """Start and end of the block of a position, if the data is that long; unshuffled, of
        one."""
        if not self.shuffle:
            return position, position + 1
        if self.buffer_size is None:
            return 0, self.examples.length or 0
        # Else an example would share its block with the same others in every epoch.
        shift = draw(self.buffer_size, seed=self.seed, stream=epoch) if epoch else 0
        first = self.buffer_size - shift
        if position < first:
            return 0, first
        start = position - (position - first) % self.buffer_size
        return start, start + self.buffer_size

    def _permutation(self, epoch: int, start: int, end: int) -> Index:
        """The positions of a block in permuted order."""
        place = epoch, start, end
        cached = self._newest  # read once: another thread may replace it
        if cached is None or cached[0] != place:
            stream = epoch if self.is_complete else epoch * EPOCHS + start
            cached = place, permutation(end - start, seed=self.seed, stream=stream) + start
            self._newest = cached
        return cached[1]

    def _numbers(self, positions: Index) -> Index:
        """The examples at some positions, without the held-out ones."""
        gaps = self.held_out - np.arange(len(self.held_out))  # examples to train on before each
        return positions + np.searchsorted(gaps, positions, side="right")

    def _shards_before(self, epoch: int, position: int) -> int:
        """From how many shards the examples before a position were drawn."""
        if epoch:
            return self.examples.shards(self.examples.reach(1 << 62))
        if not position:
            return 0
        _, end = self._block(0, position - 1)
        return self.examples.shards(min(end, self.reach(end)) + len(self.held_out))
