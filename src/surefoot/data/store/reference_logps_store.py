"""Cache of reference log-probabilities on disk: two numbers per example (chosen, rejected).

They are stored beside the encoded datasets, in pieces that are written as soon as they are
computed. Any of them may be deleted at any time.

    reference/<key>/<first item>.safetensors     values: float32 [items, 2]; check: their hash
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ...errors import DataError
from ...storage import files
from .dataset import EncodedDataset, EncodedStore, Ragged, with_columns

PIECE = 2048  # items; 16 KiB
FEATURE = "reference"
Values = NDArray[np.float32]  # [items, 2]


@dataclass(frozen=True)
class ReferenceLogpsStore:
    """Reference log-probabilities of ``num_items`` items, under a key for the items and the
    reference model (see ``references``).
    """

    folder: Path
    num_items: int

    @property
    def pieces(self) -> list[range]:
        """The items of each piece."""
        count = self.num_items
        return [range(start, min(start + PIECE, count)) for start in range(0, count, PIECE)]

    def read(self, piece: range) -> Values | None:
        """The stored values of a piece; None if it is missing or damaged."""
        path = self._path(piece)
        with files.raising(DataError, "data.cache_dir"):
            try:
                with files.open_file(path) as file:
                    found = load(files.read_all(file, 1 << 20))
            except (FileNotFoundError, SafetensorError):
                return None
        values, check = found.get("values"), found.get("check")
        if values is None or check is None or values.shape != (len(piece), 2):
            return None
        return values if check.tobytes() == _check(values) else None

    def write(self, piece: range, values: Values) -> None:
        """Store a piece. Raises ``DataError``."""
        check = np.frombuffer(_check(values), np.uint8)
        with files.raising(DataError, "data.cache_dir"):
            files.make_folder(self.folder)
            data = save({"values": values, "check": check})
            files.write_aside(self._path(piece), data)

    def _path(self, piece: range) -> Path:
        return self.folder / f"{piece.start:09}.safetensors"


def _check(values: Values) -> bytes:
    return files.digest(np.ascontiguousarray(values).data.cast("B")).encode()


def stores_of(datasets: Sequence[EncodedDataset]) -> list[EncodedStore]:
    """Every store from which they read, once."""
    return list({store.content: store for data in datasets for store in data.stores}.values())


def with_reference_logps(dataset: EncodedDataset, values: Mapping[str, Values]) -> EncodedDataset:
    """The same items, each with its reference log-probabilities; ``values`` by content of a
    store.
    """
    columns = {
        content: {FEATURE: Ragged(each.reshape(-1), np.arange(len(each) + 1) * 2)}
        for content, each in values.items()
    }
    return with_columns(dataset, columns)
