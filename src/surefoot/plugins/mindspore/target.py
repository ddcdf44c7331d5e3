"""Any model, with the state of its training if there is one, for MindSpore Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.converting.model_files import companions
from ...checkpoint.converting.origin import Done, ModelTarget, Origin
from ...checkpoint.disk.commit import named
from ...checkpoint.layouts.detection import detect_layout
from ...checkpoint.sources.copying import Progress, cast
from ...checkpoint.sources.source import JoinedSource, TensorsInMemory, TensorSource
from ...storage import files
from .layout import MindSpore
from .model import as_mindspore, hints_of, moments_of, numbers_of
from .naming import heads_near
from .writing import TargetFormat, check, rewrite, write

_CONFIG = "config.json"


@dataclass(frozen=True)
class MindSporeFolder(TargetFormat, ModelTarget):
    """A folder for MindSpore Transformers, full or by rank."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights and, of checkpoints of Surefoot and MindSpore, moments and step numbers."""
        check(target, self)
        if MindSpore().recognise(origin.folder):
            theirs = replace(hints_of(origin.reading, origin.base), names=None)
            rewrite(origin.folder, target, self, theirs=theirs, progress=progress)
        else:
            source, small = _opened(origin, self)
            write(source, origin.folder, target, self, small=small, progress=progress)
        notes = {"layout": self.layout}
        if self.iteration:
            return Done(notes, f"read it with checkpoint: {{load_path: {target}}}")
        inner = "/checkpoint" if self.layout == "distributed" else ""
        words = f"read it with load_checkpoint: {target}{inner}"
        return Done(notes, f"{words}, load_ckpt_format: safetensors")


def _opened(origin: Origin, wanted: TargetFormat) -> tuple[TensorSource, Mapping[str, bytes]]:
    """Everything under MindSpore's names, and the companion files."""
    folder = origin.folder
    if not named(folder) and not _is_model(folder):
        model = origin.weights()
        small: Mapping[str, bytes] = {} if origin.base is None else companions(origin.base, model)
        heads, moments, numbers = heads_near(folder, origin.base), [], TensorsInMemory({})
    else:
        whole = origin.whole()
        model, small = whole.weights, whole.small
        heads, moments = heads_near(whole.folder), moments_of(model, folder)
        batch = whole.global_batch_size
        numbers = numbers_of(folder, batch) if moments else TensorsInMemory({})
    every = JoinedSource([("", cast(model, wanted.dtype)), *moments])
    return JoinedSource([("", as_mindspore(every, wanted.names, heads)), ("", numbers)]), small


def _is_model(folder: Path) -> bool:
    """Whether it can be opened as a model: mere weights have no configuration."""
    layout = detect_layout(folder)
    if layout is None or not layout.is_whole_model:
        return False
    return layout.has_adapter_config or files.exists(folder / _CONFIG)
