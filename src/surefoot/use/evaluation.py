"""How good a model is on examples it has not seen, measured as training measures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from ..batch import Features, Probe
from ..data.example import Dropped, Example, Truncated
from ..data.media.batch_media import has_pictures
from ..data.rows.catalog import Catalog
from ..data.rows.rows import Reading, read_rows
from ..data.section import DataSection
from ..data.store.dataset import EncodedDataset, in_memory
from ..data.text.codec import Codec
from ..data.training_data import open_stream, prepare
from ..errors import DataError, RecipeError
from ..model.isolation import PromptSharing, packed_meanwhile
from ..model.numerics import autocast
from ..network.network import Network
from ..parallel.world import ALONE, World
from ..run.contexts import build_evaluation, columns_of, context_of, eval_set
from ..run.models import open_models
from ..run.parts import RunParts
from ..training.evaluation import EvaluationSet
from ..training.precompute import (
    NOTHING,
    Precomputation,
    WindowSet,
    with_items,
    with_windows,
)
from ..training.stage import POLICY, Stage, auxiliary_models, longest_row
from .model_loading import LoadedModel

logger = logging.getLogger(__name__)


def measure(
    opened: LoadedModel,
    parts: RunParts,
    examples: Sequence[Example],
    *,
    columns: Sequence[Features] | None = None,
    others: Mapping[str, Network] = MappingProxyType({}),
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """The metrics of training's evaluations, the same on all ranks: loss, perplexity and token
    accuracy, say. ``parts`` are around ``opened``. ``columns`` are those that auxiliary models
    compute for each example, if the stage has any (see ``auxiliary_columns``), ``others`` the
    models that the policy is compared with, by role (see ``staying``)."""
    items = encoded(parts.stage, examples, parts.codec)
    if columns is not None:
        items = _with_columns(items, columns)
    encoded_length = max(len(item["input_ids"]) for item in items)
    longest = longest_row(parts.stage, encoded_length, parts.data.longest)
    probes = parts.picture_probes() if has_pictures(items) else ()
    with ready_to_measure(opened, parts, longest, probes) as network:
        # ranks that share a network run in step, so each computes all batches
        networks = {POLICY: network.compared_with(others) if others else network, **others}
        evaluation = build_evaluation(parts, networks, ALONE)
        return evaluation.measure(EvaluationSet(items, NOTHING), on_batch or (lambda: None))


def num_batches(parts: RunParts, num_examples: int) -> int:
    """The approximate number of batches of ``measure``."""
    return -(-num_examples // parts.train.fixed_micro_batch_size)


def encoded(stage: Stage, examples: Sequence[Example], codec: Codec) -> list[Features]:
    """The examples as ``stage`` reads them; drops are logged. Raises ``DataError`` if all are."""
    outcomes = stage.encode(examples, codec)
    dropped = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
    if len(dropped) == len(outcomes):
        reason = dropped[0].reason if dropped else "there are none"
        raise DataError(f"no example of {len(outcomes)} can be evaluated: {reason}")
    if dropped:
        logger.warning(
            "dropped %d of %d examples: %s", len(dropped), len(outcomes), dropped[0].reason
        )
    usable = (outcome for outcome in outcomes if not isinstance(outcome, Dropped))
    return [f for o in usable for f in (o.features if isinstance(o, Truncated) else o)]


@contextmanager
def ready_to_measure(
    opened: LoadedModel, parts: RunParts, longest: int = 0, probes: Sequence[Probe] = ()
) -> Iterator[Network]:
    """While it lasts, the network of ``opened`` has the run's precision, and attention for rows
    of documents of up to ``longest`` tokens, and of pictures as in ``probes``."""
    inner, device = opened.inner, opened.device
    with ExitStack() as stack:
        is_proven = parts.data.packing and stack.enter_context(
            packed_meanwhile(inner, longest, probes)
        )
        stack.enter_context(autocast(parts.models.policy.options.precision, device))
        yield replace(opened.network, sharing=PromptSharing(is_proven))


def _with_columns(items: Sequence[Features], columns: Sequence[Features]) -> list[Features]:
    if len(columns) != len(items):
        raise DataError(
            f"the reference has read {len(columns)} examples, this model reads {len(items)} of "
            "them: their tokenizers differ too much to be compared"
        )
    return [{**item, **more} for item, more in zip(items, columns, strict=True)]


def auxiliary_columns(
    parts: RunParts, world: World = ALONE, *, dataset: str | None = None, limit: int | None = None
) -> dict[str, list[Features]]:
    """The columns of each example to evaluate on (see ``held_out``), by the name of the dataset;
    nothing if the stage has no auxiliary models. None of these is left in memory."""
    if not (roles := auxiliary_models(parts.stage, "ahead")):
        return {}
    with world.main_first():  # which fills the cache
        sources = held_out(parts, dataset=dataset, limit=limit)
    items = {
        source.name: in_memory(encoded(parts.stage, source.examples, parts.codec))
        for source in sources
    }
    size = parts.train.global_batch_size
    sets = {name: eval_set(examples, size) for name, examples in items.items()}
    precomputation = columns_of(parts, list(sets.values()), world)
    if not precomputation.is_complete:
        longest = max(int(dataset.lengths.max(initial=0)) for dataset in items.values())
        longest = longest_row(parts.stage, longest, parts.data.longest)
        parts = parts.for_rows(longest, parts.picture_probes())
        networks = open_models(parts.models, [*roles], parts.codec, world)
        precomputation.run(context_of(parts, networks, ALONE))
    return {name: _columns(window_set, precomputation) for name, window_set in sets.items()}


def staying(parts: RunParts, codec: Codec, world: World) -> dict[str, Network]:
    """The auxiliary models that stay beside the model that is evaluated, whose tokens ``codec``
    has, by role. Raises ``RecipeError`` if the model is compared with one of them on several ranks,
    which share the logits of a model."""
    if parts.stage.spec.divergence is not None and world.size > 1:
        raise RecipeError(
            f"parallel: two distributions over the vocabulary are compared on one rank, not on "
            f"{world.size}; evaluate this run on one process"
        )
    longest = parts.data.longest + parts.stage.max_new_tokens
    parts = parts.for_rows(longest, parts.picture_probes())
    return open_models(parts.models, [*auxiliary_models(parts.stage, "window")], codec, world)


def _columns(window_set: WindowSet, precomputation: Precomputation) -> list[Features]:
    """The computed columns of each example of an evaluation, in order."""
    items = with_items(window_set.items, precomputation)
    cached = with_windows(window_set, precomputation)
    loaded = window_set.items[0]
    columns: list[Features] = []
    for place, group in window_set.windows.items():
        added = cached.added(place, [items[int(item)] for item in group])
        columns += [{n: v for n, v in item.items() if n not in loaded} for item in added]
    return columns


VAL = "held out"  # what val_size takes from the training datasets
Rows = Mapping[str, Sequence[int]]  # dataset -> its rows, ascending


@dataclass(frozen=True)
class HeldOut:
    """Examples to evaluate on, under the name of their dataset."""

    name: str
    examples: Sequence[Example]


def held_out(
    parts: RunParts, *, dataset: str | None = None, limit: int | None = None
) -> list[HeldOut]:
    """The evaluation examples of a run, at most ``limit`` rows of each set: its
    ``eval_datasets``, or what ``val_size`` holds out, or ``dataset`` (of a training dataset, only
    what is held out). The codec of ``parts`` determines which rows are usable, so it is to be that
    of training. Raises ``RecipeError`` if there is nothing, ``DataError`` if a dataset is missing
    or broken."""
    section, limited = parts.data, partial(_first, limit=limit)
    read = partial(_examples, section, reading=parts.encoding.reading)
    names = [str(name) for name in section.eval_datasets] if dataset is None else [dataset]
    if dataset and dataset in section.datasets and dataset not in section.eval_datasets:
        if section.val_size:
            rows = {dataset: _split(parts)[dataset]}
            return [HeldOut(dataset, read(limited(rows)))]
        logger.warning(
            "dataset %r is used for training: its evaluation metrics do not measure generalization",
            dataset,
        )
    if names:
        each = ((name, {name: _rows_of(parts, name)}) for name in names)
        return [HeldOut(name, read(limited(rows))) for name, rows in each]
    if not section.val_size:
        raise RecipeError(
            "nothing to evaluate on; set data.val_size or data.eval_datasets, or name a dataset "
            "with --dataset"
        )
    rows = _split(parts)
    return [HeldOut(VAL, read(limited(rows)))]


def _rows_of(parts: RunParts, name: str) -> list[int]:
    """The rows of a dataset with trained tokens."""
    reference = parts.data.reference(name)
    section = replace(
        parts.encoding.section,
        datasets=(reference,),
        eval_datasets=(),
        val_size=0.0,
        mix_strategy="concat",
        interleave_probs=None,
    )
    encoding = replace(parts.encoding, section=section, start_share=None)
    (rows,) = _rows(prepare(encoding).train)
    return rows


def _split(parts: RunParts) -> dict[str, list[int]]:
    """The rows that ``val_size`` holds out, by dataset."""
    if parts.data.streaming:
        stream = open_stream(parts.encoding)
        numbers = stream.train.rows(int(stream.held[-1]) + 1)[stream.held]
        return dict(stream.train.rows_by_dataset(numbers))
    rows = _rows(prepare(parts.encoding).evals[""])
    return dict(zip(map(str, parts.data.datasets), rows, strict=True))


def _rows(dataset: EncodedDataset) -> list[list[int]]:
    """The rows of each store that the dataset uses."""
    starts = np.cumsum([0, *(len(store) for store in dataset.stores)])
    rows_by_store = []
    for store, start in zip(dataset.stores, starts, strict=False):
        inside = (dataset.index >= start) & (dataset.index < start + len(store))
        rows_by_store.append(np.unique(store.rows[dataset.index[inside] - start]).tolist())
    return rows_by_store


def _first(rows: Rows, limit: int | None) -> dict[str, list[int]]:
    """The first ``limit`` rows over all datasets."""
    pairs = [(name, row) for name, of_it in rows.items() for row in of_it][:limit]
    return {name: [row for owner, row in pairs if owner == name] for name in rows}


def _examples(section: DataSection, rows: Rows, *, reading: Reading) -> list[Example]:
    catalog = Catalog(section)
    examples: list[Example] = []
    for name, numbers in rows.items():
        if numbers:
            rows_of_it = read_rows(catalog.entry(name), section, np.array(numbers), reading)
            examples += [row for row in rows_of_it if isinstance(row, Example)]
    return examples
