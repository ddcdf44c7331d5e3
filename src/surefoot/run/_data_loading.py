"""The data of a Trainer: encoded datasets, and loaders of them.

With ``data.streaming`` an encoder worker encodes while these are read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count

from ..data.example import Example
from ..data.order.loader import Loader, for_device
from ..data.order.micro_batches import Batching, Collation
from ..data.rows.catalog import Catalog
from ..data.rows.rows import read_rows
from ..data.section import MediaSection
from ..data.text.codec import Codec
from ..data.text.collation import num_trained
from ..data.text.preview import as_line
from ..data.training_data import AnyData, open_stream, prepare
from ..errors import DataError, counted
from ..model.loading import device
from ..parallel.section import launched
from ..parallel.world import World
from ..training.windows import num_steps, remarks
from ._encoder_worker import POLL_SECONDS
from .parts import RunParts
from .rows_record import compare_rows

logger = logging.getLogger(__name__)


def open_data(parts: RunParts, world: World) -> tuple[AnyData, AbstractContextManager[object]]:
    """The datasets of a run, and the worker that must run while they are read."""
    with world.main_first():
        for remark in _remarks_on_text(parts):
            logger.warning("%s", remark)
        if parts.data.streaming:
            check_windows(parts, None, world)
            for remark in remarks(parts.train, parts.optim, None, parts.train.max_steps):
                logger.warning("%s", remark)
            return stream_data(parts)
        data = prepare(parts.encoding)
    names, start = [str(name) for name in parts.data.datasets], parts.start
    place = None if start is None or start.writer is not None else start.folder
    compare = partial(compare_rows, data.train, names, parts.codec, parts.train.folder, place)
    world.on_main(compare)
    for line in data.report.lines():  # such as those of dropped rows
        logger.info("%s", line)
    check_windows(parts, len(data.train), world)
    train = parts.train
    if data.evals and not (train.eval_steps or train.eval_minutes or train.eval_epoch):
        logger.info(
            "the run is not evaluated while it trains; set train.eval_epoch: true, or run "
            "`surefoot eval` on it later"
        )
    per_epoch = -(-len(data.train) // train.global_batch_size)
    per_epoch *= parts.stage.passes * parts.stage.mini_batches
    total = num_steps(train, per_epoch)
    of_settings = remarks(train, parts.optim, len(data.train), total)
    if parts.data.media != MediaSection() and not data.has_pictures:
        logger.warning("data.media: no row has a picture, so it changes nothing")
    for remark in (*parts.stage.remarks(data.train, data.evals), *of_settings):
        logger.warning("%s", remark)
    return data, nullcontext()


def _remarks_on_text(parts: RunParts) -> Iterator[str]:
    """The datasets of conversations, where a stage trains on whole texts."""
    for name in () if parts.stage.uses_template else parts.data.datasets:
        entry = Catalog(parts.data).entry(str(name))
        first = next(read_rows(entry, replace(parts.data, max_samples=1)), None)
        if isinstance(first, Example) and first.text is None and first.token_ids is None:
            yield (
                f"{entry.name}: its rows are conversations, and this stage trains on their turns "
                "joined by line breaks, prompts too, without a chat template; stage: sft trains on "
                "the responses"
            )


def log_example(codec: Codec, data: AnyData) -> None:
    """Log the first training example as the model reads it, unless it is still to be encoded."""
    if data.whole is None or not len(data.whole):
        return
    item = data.whole[0]
    logger.info(
        "training example: %s, %d of them trained, in [[ ]]: %s",
        counted(len(item["input_ids"]), "token"),
        num_trained(item),
        as_line(codec, item),
    )


def check_windows(parts: RunParts, num_examples: int | None, world: World) -> None:
    """Raise ``DataError`` if a window of the run has fewer examples than the stage needs. Of a
    stream, whose length is None, the last window of an epoch is unknown."""
    train, least = parts.train, parts.stage.min_window
    size, rest = train.global_batch_size, 0
    if (
        num_examples is not None
        and num_steps(train, -(-num_examples // size)) * size > num_examples
    ):
        rest = num_examples % size  # else the run ends before the last window of the first epoch
    if (rest or size) >= least:
        return
    step = train.fixed_micro_batch_size * world.num_data_ranks
    larger = (n for n in count(step, step) if n > size)
    valid_sizes = (n for n in larger if not 0 < (num_examples or n) % n < least)
    cure = f"set train.global_batch_size={next(valid_sizes)}, for example"
    if num_examples is not None and num_examples < least:
        cure = "give it more rows"
    what = f"the last of {num_examples:,} rows" if rest else "each row"
    raise DataError(
        f"train.global_batch_size: the stage compares the rows of a global batch, and with "
        f"{size:,}, {what} would be alone; {cure}"
    )


def stream_data(parts: RunParts) -> tuple[AnyData, AbstractContextManager[object]]:
    """Datasets to read while an encoder worker, one on every machine, encodes them. Raises
    ``RecipeError`` if the run counts epochs, whose length is not known yet."""
    place, encoding, worker = launched(), parts.encoding, parts.encoder
    if place is not None and place[2]:
        return open_stream(encoding, partial(time.sleep, POLL_SECONDS)), nullcontext()
    # A process, no thread: rendering is Python, and would hold the interpreter while kernels are to
    # be launched (docs/decisions/0033).
    if len(parts.data.datasets) > 1:
        logger.warning(
            "data.streaming: datasets are read one after another; shuffling mixes at most "
            "data.buffer_size = %d examples",
            parts.data.buffer_size,
        )
    data = open_stream(encoding, worker.wait)
    if data.train.length is None:
        num_steps(parts.train, None)  # before anything slow
        worker.start()
    return data, worker


def build_loader(parts: RunParts, data: AnyData, collation: Collation, world: World) -> Loader:
    """Windows of micro-batches from the training examples."""
    return Loader(
        data.order(parts.data, seed=parts.train.seed),
        Batching(
            collation,
            micro_batch_size=parts.train.fixed_micro_batch_size,
            rank=world.data_rank,
            world_size=world.num_data_ranks,
        ),
        global_batch_size=parts.train.global_batch_size,
        prefetch=for_device(device()),
    )


def packed_bounds(parts: RunParts, loader: Loader) -> list[int]:
    """The bounds of the documents of a typical row of the run: its first one; for a stream, which
    cannot be read in advance, one of documents half as long as they may be. What the stage adds
    to a document is there."""
    added = parts.stage.max_new_tokens
    if loader.order.is_complete:
        bounds = loader.window_at(0, 0)[0].cu_seqlens
        return [] if bounds is None else [int(b) + i * added for i, b in enumerate(bounds)]
    length = parts.data.longest // 2 + added
    return [length * count for count in range(parts.train.fixed_micro_batch_size + 1)]
