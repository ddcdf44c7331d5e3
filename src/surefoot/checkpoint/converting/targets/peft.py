"""A PEFT adapter by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....errors import CheckpointError
from ....storage import files
from ....storage.tensor_names import adapter_names, is_adapted
from ...disk import strict_json
from ...disk.commit import new_folder, write_small
from ...layouts.detection import detect_layout
from ...layouts.opening import open_folder
from ...sources.copying import Progress, cast, copy
from ...sources.source import Renamed, TensorSource
from ...sources.weights import ADAPTER_CONFIG, DISTRIBUTED
from ..model_files import adapter_files
from ..origin import Done, Origin, WeightsTarget


@dataclass(frozen=True, kw_only=True)
class PEFTAdapter(WeightsTarget):
    """An adapter by itself."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """The adapter's weights and settings, without the state of its training."""
        folder, layout = origin.folder, detect_layout(origin.folder)
        is_marked = layout is not None and layout.has_adapter_config
        if is_marked and files.exists(folder / ADAPTER_CONFIG):
            source, small = open_folder(folder), adapter_files(folder)
        else:
            source, small = _inside(folder, origin.weights())
        source = cast(source, self.dtype)
        with new_folder(target) as made:
            copy(source, made, stem="adapter_model", max_shard_size=None, progress=progress)
            write_small(made, small)
        return Done()


def _inside(folder: Path, source: TensorSource) -> tuple[TensorSource, dict[str, bytes]]:
    """The adapter in a checkpoint of another trainer, and its settings, which the Trainer writes
    at the end of a run, one folder above."""
    if not any(map(is_adapted, source.shapes())):
        raise CheckpointError(f"{folder}: it contains no adapter; use --to huggingface for a model")
    top = folder.absolute()
    top = top.parent if top.name in DISTRIBUTED else top
    place = next((p for p in (top, top.parent) if files.exists(p / ADAPTER_CONFIG)), None)
    if place is None:
        raise CheckpointError(
            f"{folder}: it contains the weights of an adapter, but neither it nor the folder above "
            f"has an {ADAPTER_CONFIG}; copy it there from the run that wrote them"
        )
    has_biases = strict_json.read_object(place / ADAPTER_CONFIG).get("bias", "none") != "none"
    names = adapter_names(source.shapes(), has_biases=has_biases)
    return Renamed(source, names), adapter_files(place)
