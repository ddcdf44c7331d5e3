"""Check the files that a model is made of: their headers in advance, and all of them against their
manifests while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..checkpoint.layouts.detection import has_manifest
from ..checkpoint.reading.verification import ConcurrentCheck, verify_weights
from ..errors import DamagedFileError, ModelError, SurefootError
from ..log import silenced
from ..model.pretrained.adapter import WEIGHTS as ADAPTER_WEIGHTS
from ..model.pretrained.loading import WEIGHTS, resolve, training_dtype
from ..model.section import ModelSection
from ..parallel.world import World
from .draft import Draft
from .meta import init_on_meta


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


def check_files(base: Path | None, section: ModelSection) -> None:
    """Raise ``ModelError`` if a file of weights in ``base`` (unset: where ``section`` finds it) or
    of the adapter is truncated, or if those in ``base`` contain other tensors than the architecture
    has. Headers alone are read."""
    base = base or resolve(section)
    with silenced():
        found = init_on_meta(base, section, dtype=training_dtype(section))
    adapters = [*([] if section.adapter is None else [section.adapter]), *section.frozen_adapters]
    for folder in adapters:
        if has_manifest(folder) and (problems := verify_weights(folder).problems):
            raise DamagedFileError(folder, problems[0])
    paths = sorted(base.glob(WEIGHTS)) if found is None else []
    for path in [*paths, *(folder / ADAPTER_WEIGHTS for folder in adapters)]:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: damaged or truncated file: {error}; fetch the model again"
            ) from None
