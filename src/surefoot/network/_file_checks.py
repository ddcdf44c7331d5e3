"""Check the files that a model is made of: their headers in advance, and all of them against their
manifests while they are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.layouts.detection import has_manifest
from ..checkpoint.layouts.opening import has_opener, open_named
from ..checkpoint.verification import ConcurrentCheck, verify_weights
from ..errors import DamagedFileError, SurefootError
from ..log import silenced
from ..model.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from ..model.loading import WEIGHTS, resolve, training_dtype
from ..model.section import ModelSection
from ..storage.weight_files import open_weights
from .draft import Draft
from .shard_loading import init_on_meta

logger = logging.getLogger(__name__)


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
        damage = check.wait()
        reports = world.gathered(None if damage is None else (damage.folder, str(damage)))
        for report in reports:
            if report is not None:
                raise DamagedFileError(*report)


def check_files(base: Path | None, section: ModelSection) -> None:
    """Raise ``ModelError`` if a file of weights in ``base`` (unset: where ``section`` finds it) or
    of the adapter is truncated, or if those in ``base`` contain other tensors than the architecture
    has. Headers alone are read."""
    base = base or resolve(section)
    with silenced():
        meta_model = init_on_meta(base, section, dtype=training_dtype(section))
    if meta_model is None and has_opener(base):
        open_named(base, reading=section.reading)  # which says what is wrong with its slices
    adapters = [*([] if section.adapter is None else [section.adapter]), *section.frozen_adapters]
    for folder in adapters:
        if has_manifest(folder) and (problems := verify_weights(folder).problems):
            raise DamagedFileError(folder, problems[0])
    paths = sorted(base.glob(WEIGHTS)) if meta_model is None else []
    for path in [*paths, *(folder / ADAPTER_WEIGHTS for folder in adapters)]:
        with open_weights(path):
            pass
