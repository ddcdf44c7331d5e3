"""A PEFT adapter by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....errors import CheckpointError
from ....storage import files
from ...disk.atomic_folder import new_folder, write_small
from ...layouts.detection import detect_layout
from ...layouts.opening import open_folder
from ...sources.copying import DtypeName, Progress, cast, copy
from ...sources.weights import ADAPTER_CONFIG
from ..model_files import adapter_files
from ..origin import Done, Hints, Origin


@dataclass(frozen=True)
class PEFTAdapter:
    """An adapter by itself."""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    @property
    def hints(self) -> Hints:
        """What it says of the folder to convert."""
        return Hints()

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """The adapter's weights and settings, without the state of its training."""
        folder, layout = origin.folder, detect_layout(origin.folder)
        is_marked = layout is not None and layout.has_adapter_config
        if not (is_marked and files.exists(folder / ADAPTER_CONFIG)):
            raise CheckpointError(
                f"{folder}: it contains no adapter; use --to huggingface for a model"
            )
        source, small = cast(open_folder(folder), self.dtype), adapter_files(folder)
        with new_folder(target) as made:
            copy(source, made, stem="adapter_model", max_shard_size=None, progress=progress)
            write_small(made, small)
        return Done()
