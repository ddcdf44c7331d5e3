"""Load a checkpoint on all ranks, wherever its bytes are: in a folder that all see, or in a store,
of which each rank reads what it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.apart import Apart
from ..checkpoint.disk.commit import step_of
from ..checkpoint.fetching import fetch, is_outline, outline, outline_of
from ..checkpoint.loading import load
from ..checkpoint.saving.saver import AsyncSaver
from ..checkpoint.state.roles import Stateful
from ..errors import DamagedFileError
from ..parallel.world import World


def readable(saver: AsyncSaver, checkpoint: Path, world: World) -> Path:
    """A folder from which ``restore`` can load a checkpoint that ``saver`` has saved, or was given
    to resume from. A collective call."""
    step = step_of(checkpoint)
    if saver.apart is None or checkpoint != saver.path_of(step):
        return checkpoint
    return outlined(saver.apart, step, world)


def outlined(apart: Apart, step: int, world: World) -> Path:
    """The outline of a stored checkpoint, one for each machine. A collective call. Raises
    ``DamagedFileError`` on all ranks if one of them finds damage."""
    folder = outline_of(apart, step, world.first_local_rank)
    with agreed_damage(folder, world):
        if world.is_local_main:
            outline(apart, step, world.first_local_rank)
    # Where ranks are dealt to machines in turn, that is the rank of another one.
    with agreed_damage(folder, world):
        if not is_outline(folder):
            folder = outline(apart, step, world.rank)
    return folder


@contextmanager
def agreed_damage(folder: Path, world: World) -> Iterator[None]:
    """A block that meets no other rank: a ``DamagedFileError`` in it is raised on all ranks, as is
    any other error (``World.together``)."""
    damage = None
    with world.together():
        try:
            yield
        except DamagedFileError as error:
            damage = str(error)
    if why := world.first_of(damage):
        raise DamagedFileError(folder, why)


def restore(
    folder: Path,
    states: Mapping[str, Stateful],
    world: World,
    *,
    only: Collection[str] | None = None,
    is_verified: bool = False,
) -> None:
    """``load``, as a collective call. Raises ``DamagedFileError`` on all ranks if one of them finds
    damage in a store; nothing has been loaded then."""
    if is_outline(folder):
        with agreed_damage(folder, world):
            fetch(folder, states, only=only)
        is_verified = True
    load(folder, states, only=only, is_verified=is_verified)
