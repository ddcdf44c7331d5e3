"""Precomputed columns: outputs of auxiliary models, computed before the first step and cached
beside the encoded data.

A column is cached by item if it does not depend on other examples (reference log-probabilities), or
by global window if it does. It is stored in pieces that are written as soon as they are computed;
any of them may be deleted at any time.

    reference/<key>/<first item>.safetensors     each column's values and lengths; check: their hash
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..batch import Features
from ..data.data_order import Index
from ..data.order.micro_batches import Items
from ..data.store.cache import Ragged
from ..data.store.dataset import EncodedDataset
from ..errors import DataError, ModelError
from ..model.section import ModelSection
from ..parallel.world import World
from ..storage import files
from ..storage.files import read_json
from ..storage.weight_files import is_adapter
from .stage import AuxiliaryModel, Stage, StageContext, auxiliary_models
from .windows import Place

logger = logging.getLogger(__name__)
VERSION = 5  # of what is computed, how, and of the files
FOLDER = "reference"  # in data.cache_dir
# Killed within, a run goes on from the last whole piece.
PIECE = 2048  # items
REPORT_SECONDS = 10.0
Columns = Mapping[str, Ragged]


@dataclass(frozen=True)
class KeptPiece:
    """A file of columns, and the groups of examples for which they are computed."""

    folder: Path
    start: int  # its first example, counted over all pieces in the folder
    items: Items
    groups: Sequence[Index]  # examples that ``Stage.precompute`` is given together

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.start:09}.safetensors"

    @property
    def num_items(self) -> int:
        """Examples of all groups."""
        return sum(len(group) for group in self.groups)

    def compute(self, stage: Stage, context: StageContext) -> Columns:
        """The columns that ``stage`` adds. A collective call. Raises ``ModelError`` unless
        finite."""
        added: list[Features] = []
        for group in self.groups:
            examples = [self.items[int(item)] for item in group]
            extended = stage.precompute(context, examples)
            pairs = zip(extended, examples, strict=True)
            added += [{n: v for n, v in new.items() if n not in old} for new, old in pairs]
        columns = {name: _ragged([item[name] for item in added]) for name in added[0]}
        for name, (values, _) in columns.items():
            if not np.isfinite(values[:]).all():
                raise ModelError(
                    f"the {name}'s log-probabilities are NaN or infinite; check the model and "
                    "train.precision"
                )
        return columns

    def read(self) -> Columns | None:
        """The stored columns; None if they are missing or damaged."""
        try:
            with files.open_file(self.path) as file:
                arrays = load(files.read_all(file, 1 << 30))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("%s cannot be used (%s): computing it again", self.path, error)
            return None
        check = arrays.pop("check", None)
        if check is None or check.tobytes() != _check(arrays):
            return None
        names = [name.removesuffix(".values") for name in arrays if name.endswith(".values")]
        columns = {name: _from_lengths(arrays[f"{name}.values"], arrays[name]) for name in names}
        is_complete = all(len(column.offsets) == self.num_items + 1 for column in columns.values())
        return columns if columns and is_complete else None

    def write(self, columns: Columns) -> None:
        """Store the columns. Raises ``DataError``."""
        arrays: dict[str, NDArray[np.generic]] = {}
        for name, (values, offsets) in columns.items():
            arrays |= {f"{name}.values": np.ascontiguousarray(values[:]), name: np.diff(offsets)}
        arrays["check"] = np.frombuffer(_check(arrays), np.uint8)
        with files.raising(DataError, "data.cache_dir"):
            files.make_folder(self.folder)
            files.write_aside(self.path, save(arrays))


@dataclass
class Precomputation:
    """The columns of a run, as far as they exist."""

    stage: Stage
    identity: str  # of the models, and of how they compute
    pieces: Sequence[KeptPiece]
    columns: list[Columns | None]  # of each piece; None: to be computed
    world: World
    _reported: float = field(default_factory=time.monotonic, init=False)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to compute."""
        return all(columns is not None for columns in self.columns)

    def run(self, context: StageContext) -> None:
        """Compute what is missing. A collective call. Raises ``ModelError`` if a value is NaN or
        infinite, ``DataError`` if a column cannot be written."""
        if self.is_complete:
            if self.pieces:
                logger.info("reference log-probabilities: loaded from the cache")
            return
        started = time.monotonic()
        for number, piece in enumerate(self.pieces):
            if self.columns[number] is None:
                columns = self.columns[number] = piece.compute(self.stage, context)
                if self.world.is_main:
                    piece.write(columns)
                self._report(started)
        seconds = time.monotonic() - started
        logger.info(
            "reference log-probabilities: computed for %s examples in %.1f s",
            f"{self._num_done:,}",
            seconds,
        )

    def blank(self, context: StageContext) -> None:
        """Compute with ``context`` without storing: for measurements of speed."""
        self.columns = [piece.compute(self.stage, context) for piece in self.pieces]

    def columns_of(self, content: str) -> Columns:
        """The columns of a store, or of the windows in an order, concatenated."""
        folder = _key(self.identity, content)
        pairs = zip(self.pieces, self.columns, strict=True)
        parts = [columns for piece, columns in pairs if columns and piece.folder.name == folder]
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    @property
    def _num_done(self) -> int:
        pairs = zip(self.pieces, self.columns, strict=True)
        return sum(piece.num_items for piece, columns in pairs if columns is not None)

    def _report(self, started: float) -> None:
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            num_done, total = self._num_done, sum(piece.num_items for piece in self.pieces)
            speed = num_done / (self._reported - started)
            logger.info(
                "reference log-probabilities: %d of %d examples, %.0f examples/s",
                num_done,
                total,
                speed,
            )


@dataclass(frozen=True)
class WindowSet:
    """Examples for training or evaluation, and their windows in order."""

    items: EncodedDataset
    find: Callable[[], Mapping[Place, Index]]
    order: str  # what the order depends on

    @cached_property
    def windows(self) -> Mapping[Place, Index]:
        """The items of each window."""
        return self.find()


@dataclass(frozen=True)
class KeptWindows:
    """Columns of windows, by their places."""

    columns: Columns
    starts: Mapping[Place, int]  # of each window's first example

    def added(self, place: Place, examples: Sequence[Features]) -> Sequence[Features]:
        """The examples of the window at ``place``, with their columns."""
        if not self.columns:
            return examples
        start = self.starts[place]
        return [
            {**item, **{name: _item(column, i) for name, column in self.columns.items()}}
            for i, item in enumerate(examples, start)
        ]


NOTHING = KeptWindows({}, {})


def precomputation(
    stage: Stage, identity: str, root: Path, sets: Sequence[WindowSet], world: World
) -> Precomputation:
    """The known columns of ``sets``, and what the models of ``identity`` are to compute."""
    cut = {"item": _by_item, "window": _by_window}[stage.kept_by]
    is_needed = bool(auxiliary_models(stage, "ahead"))
    pieces = list(cut(root / FOLDER, identity, sets)) if is_needed else []
    columns = [piece.read() for piece in pieces] if world.is_main else None
    return Precomputation(stage, identity, pieces, world.from_main(columns), world)


def _by_item(root: Path, identity: str, sets: Sequence[WindowSet]) -> Iterator[KeptPiece]:
    stores = {store.content: store for window_set in sets for store in window_set.items.stores}
    for content, store in stores.items():
        for start in range(0, len(store), PIECE):
            group = np.arange(start, min(start + PIECE, len(store)))
            yield KeptPiece(root / _key(identity, content), start, store, (group,))


def _by_window(root: Path, identity: str, sets: Sequence[WindowSet]) -> Iterator[KeptPiece]:
    for window_set in sets:
        folder, start, groups = root / _key(identity, window_set.order), 0, list[Index]()
        for group in window_set.windows.values():
            groups.append(group)
            if (count := sum(map(len, groups))) >= PIECE:
                yield KeptPiece(folder, start, window_set.items, tuple(groups))
                start, groups = start + count, []
        if groups:
            yield KeptPiece(folder, start, window_set.items, tuple(groups))


def with_items(dataset: EncodedDataset, precomputed: Precomputation) -> EncodedDataset:
    """The same items, with their columns that are cached by item."""
    if precomputed.stage.kept_by != "item" or not precomputed.pieces:
        return dataset
    stores = tuple(
        replace(store, features={**store.features, **precomputed.columns_of(store.content)})
        for store in dataset.stores
    )
    return replace(dataset, stores=stores)


def with_windows(window_set: WindowSet, precomputed: Precomputation) -> KeptWindows:
    """The columns of a set's windows that are cached by window."""
    if precomputed.stage.kept_by != "window" or not precomputed.pieces:
        return NOTHING
    starts = np.cumsum([0, *map(len, window_set.windows.values())]).tolist()
    return KeptWindows(
        precomputed.columns_of(window_set.order),
        dict(zip(window_set.windows, starts, strict=False)),
    )


def model_of(auxiliary: AuxiliaryModel, policy: ModelSection) -> ModelSection:
    """The model of an auxiliary one: the policy, or another one."""
    if auxiliary.model is None:
        return policy
    changes = {"revision": None, "adapter": None, "frozen_adapters": (), "quantization_bit": None}
    section = replace(policy, path=auxiliary.model, **changes)  # type: ignore[arg-type]
    base = _base_of(Path(auxiliary.model))
    return section if base is None else replace(section, path=base, adapter=Path(auxiliary.model))


def _base_of(folder: Path) -> str | None:
    """The model that the adapter in ``folder`` is of; None if it is no adapter."""
    if not is_adapter(folder):
        return None
    file = folder / "adapter_config.json"
    base = read_json(file).get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{file}: names no base_model_name_or_path")
    return str(base)


@dataclass(frozen=True)
class Ingredients:
    """All that columns are made from besides the examples, and so their key: the stage, its models
    with the hashes of their files, and how they compute."""

    stage: str
    models: Mapping[str, tuple[object, ModelSection, Mapping[str, str]]]  # by role; spec and hashes
    vocabulary: int  # tokens: rows that embeddings get are in every sum over the vocabulary
    computing: Sequence[object]  # precision, packing

    @property
    def identity(self) -> str:
        """A text that is equal for equal ingredients."""
        # Every setting, so that a new one is in the key unless it is known to change nothing.
        parts = [
            [role, str(spec), sorted(hashes.items()), _computed_with(section)]
            for role, (spec, section, hashes) in sorted(self.models.items())
        ]
        settings = [str(value) for value in self.computing]
        return json.dumps([VERSION, self.stage, parts, self.vocabulary, settings])


# Of a model: where it is, as its files count by their content; and what a frozen one never does.
_ELSEWHERE = frozenset({"path", "revision", "hub", "adapter", "frozen_adapters", "new_weights"})
_NOT_FROZEN = frozenset({"gradient_checkpointing", "neftune_noise_alpha", "eos_token", "compile"})


def _computed_with(section: ModelSection) -> list[str]:
    names = [each.name for each in fields(section) if each.name not in _ELSEWHERE | _NOT_FROZEN]
    return [f"{name}={getattr(section, name)}" for name in names]


def _key(identity: str, content: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{identity} {content}".encode())


def _check(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    values = {name: np.ascontiguousarray(arrays[name]).data.cast("B") for name in sorted(arrays)}
    parts = [f"{name} {files.digest(data)}" for name, data in values.items()]
    return files.digest(" ".join(parts).encode()).encode()


def _ragged(lists: Sequence[Sequence[float]]) -> Ragged:
    arrays = [np.asarray(values) for values in lists]
    return _from_lengths(np.concatenate(arrays), np.array([len(a) for a in arrays], np.int64))


def _from_lengths(values: NDArray[Any], lengths: NDArray[Any]) -> Ragged:
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def _joined(parts: Sequence[Ragged]) -> Ragged:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return _from_lengths(np.concatenate([part.flat[:] for part in parts]), lengths)


def _item(column: Ragged, index: int) -> Sequence[int]:
    return column.flat[column.offsets[index] : column.offsets[index + 1]]  # type: ignore[return-value]
