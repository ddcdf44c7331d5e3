"""Convert a folder: every target, and the views of a folder that need models to be located."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ...checkpoint.converting.origin import Done, Hints, Target, WholeModel
from ...checkpoint.layouts.opening import has_opener, open_any, open_named
from ...checkpoint.sources.copying import DtypeName, Progress, silent
from ...checkpoint.sources.source import TensorSource
from ..model_loading import ModelFolders, find_parts
from ..model_location import locate
from .exported import whole_model

USUAL = "surefoot"  # where only a layout or mesh is named


@dataclass(frozen=True)
class FolderToConvert:
    """A folder, and what the user said of it."""

    folder: Path
    given: Hints = field(default_factory=Hints)

    @cached_property
    def base(self) -> Path | None:
        """Where ``--base`` leads to."""
        return None if self.given.base is None else locate(self.given.base).folder

    @property
    def reading(self) -> Mapping[str, object]:
        """The options of its layout that the user named."""
        return self.given.reading

    def adapter_base(self) -> Path | None:
        """The folder of an adapter's base; None for a full model."""
        return None if self._parts.adapter is None else self._parts.model

    @cached_property
    def _parts(self) -> ModelFolders:
        return find_parts(self.folder, base=self.given.base)

    def weights(self) -> TensorSource:
        """The weights as stored, under Hugging Face's names."""
        if has_opener(self.folder):
            return open_named(self.folder, self.base, options=self.given.reading)
        return open_any(self.folder, trust_pickle=self.given.trust_pickle)

    def whole(self, dtype: DtypeName | None = None) -> WholeModel:
        """The model; an adapter is merged into its base."""
        weights, small = whole_model(self._parts, dtype=dtype)
        recipe = self._parts.recipe
        batch = None if recipe is None else recipe.train.global_batch_size
        return WholeModel(weights, small, self._parts.model, batch)


def convert(
    folder: Path,
    target: Path,
    to: Target,
    progress: Progress = silent,
    reading: Mapping[str, object] | None = None,
) -> Done:
    """Write ``folder`` as ``to`` says into the new folder ``target``, from file to file: no model
    is built, and memory does not grow with it. Raises ``CheckpointError`` or ``ModelError`` for
    damaged weights, a base that is missing, or a write that fails, ``OptionError`` for options that
    mean nothing for this folder. ``reading`` has options of the folder's layout."""
    given = replace(to.hints, reading=reading or {})
    return to.write(FolderToConvert(folder, given), target, progress)
