"""A checkpoint whose small files are here and whose tensors are in a store: its *outline*.

A rank brings what it needs of the tensors before it loads them (``fetch``); other files look as in
any checkpoint. A file beside them says where the rest is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..errors import CheckpointError
from ..storage import files
from ..terminal_text import in_bytes
from .apart import Apart
from .disk.folder import CheckpointFolder, open_checkpoint
from .disk.strict_json import dump, parse_object
from .disk.tensorfile import num_bytes as num_bytes_of
from .loading import needed
from .remote import stores
from .state.roles import Stateful

logger = logging.getLogger(__name__)
STORED = ".stored.json"
_MAX_BYTES = 1 << 16


def outline(apart: Apart, step: int, machine: int) -> Path:
    """Download all of a stored checkpoint but its tensors, for the ranks of this machine; its
    folder here. Raises ``CheckpointError``."""
    folder = outline_of(apart, step, machine)
    with files.raising(CheckpointError, f"cannot copy the checkpoint of step {step}"):
        files.make_folder(folder)
        stores().outline(apart, step, folder)
        place = {"apart": asdict(apart), "step": step}
        files.write_aside(folder / STORED, dump(place))
    return folder


def outline_of(apart: Apart, step: int, machine: int) -> Path:
    """The folder of an outline."""
    return apart.outlines(machine) / f"checkpoint-{step}"


def is_outline(folder: Path) -> bool:
    """Whether tensors of the checkpoint in ``folder`` may be elsewhere."""
    return files.exists(folder / STORED)


def fetch(
    folder: Path, states: Mapping[str, Stateful], *, only: Collection[str] | None = None
) -> None:
    """Bring what this rank will load of an outline, every byte checked. Raises
    ``DamagedFileError`` for what is damaged in the store."""
    with files.raising(CheckpointError):
        place = parse_object(files.read_inside(folder, STORED, _MAX_BYTES), str(folder / STORED))
    apart, step = Apart(**place["apart"]), place["step"]
    bring = partial(stores().fetch_file, apart, step, folder)
    checkpoint = _Outline(folder, open_checkpoint(folder).manifest, bring=bring)
    wanted = needed(checkpoint, states, only=only)
    num_bytes = stores().fetch_pieces(apart, step, checkpoint, wanted)
    size = in_bytes(sum(num_bytes_of(piece.dtype, box.shape) for piece, box in wanted))
    message = "%s: %s of its tensors are needed here, %s came from the store"
    logger.info(message, folder.name, size, in_bytes(num_bytes))


@dataclass(frozen=True)
class _Outline(CheckpointFolder):
    """Hash lists of other ranks come when they are read."""

    bring: Callable[[str], None] | None = None

    def small(self, name: str) -> bytes:
        if self.bring is not None and not files.exists(self.path / name):
            self.bring(name)
        return super().small(name)
