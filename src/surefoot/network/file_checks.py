"""Check the files that a model is made of against their manifests, while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..checkpoint.reading.concurrent_check import ConcurrentCheck
from ..errors import DamagedFileError, SurefootError
from ..parallel.world import World
from .draft import Draft


@contextmanager
def checked_files(draft: Draft) -> Iterator[None]:
    """A block that reads the files of ``draft``; at its end every byte of them is checked.

    Raises ``DamagedFileError``, on all ranks if one has found damage. It takes the place of an
    error of the block: damaged values may look like a wrong setting.
    """
    options, world = draft.options, draft.world
    section = draft.section
    read = [options.weights or draft.base, section.adapter, *section.frozen_adapters]
    folders = [folder for folder in read if folder is not None] if options.is_read else []
    with ConcurrentCheck(folders, [draft.base], rank=world.rank, num_ranks=world.size) as check:
        try:
            yield
        except SurefootError as error:
            if (damage := check.wait()) is not None:
                raise damage from error
            raise
        _raise_first(check.wait(), world)


def _raise_first(damage: DamagedFileError | None, world: World) -> None:
    found = world.gathered(None if damage is None else (damage.folder, str(damage)))
    for one in found:
        if one is not None:
            raise DamagedFileError(*one)
