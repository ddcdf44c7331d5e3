"""Write any model, with its training state if it has one, in MindSpore Transformers' form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.disk.commit import named
from ..checkpoint.mindspore.names import heads_near
from ..checkpoint.mindspore.rewrite import TargetFormat, check, rewrite, write
from ..checkpoint.mindspore.theirs import (
    NOTHING_MORE,
    MindSporeHints,
    as_mindspore,
    moments_of,
    numbers_of,
)
from ..checkpoint.sources.copying import Progress, cast
from ..checkpoint.sources.joined import JoinedSource
from ..checkpoint.sources.source import TensorsInMemory, TensorSource
from ..checkpoint.weights import Layout, detect_layout
from ..errors import CheckpointError
from ..interchange.source import open_source
from ..storage import files
from .converted import companions
from .exported import whole_model
from .model_loading import find_parts

_CONFIG = "config.json"


def write_mindspore(
    folder: Path,
    target: Path,
    wanted: TargetFormat,
    *,
    theirs: MindSporeHints = NOTHING_MORE,
    trust_pickle: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the content of ``folder`` into the new folder ``target`` in MindSpore's form.

    Moments and step numbers of Surefoot's and MindSpore's checkpoints are included, under the names
    of ``adam_m`` and ``adam_v``.

    Raises:
        CheckpointError: a model whose tensors have no name there, sizes that do not fit it, damaged
            weights, or ``target`` exists.
    """
    check(target, wanted)
    with files.raising(CheckpointError):
        layout = detect_layout(folder)
    if layout == "mindspore":
        rewrite(folder, target, wanted, theirs=theirs, progress=progress)
        return
    source, small = _opened(folder, layout, wanted, theirs, trust_pickle)
    write(source, folder, target, wanted, small=small, progress=progress)


def _opened(
    folder: Path,
    layout: Layout | None,
    wanted: TargetFormat,
    theirs: MindSporeHints,
    trust_pickle: bool,
) -> tuple[TensorSource, Mapping[str, bytes]]:
    """Everything under MindSpore's names, and the companion files."""
    if not named(folder) and (layout in (None, "dcp") or not _is_model(folder, layout)):
        model = open_source(folder, trust_pickle=trust_pickle)
        small = {} if theirs.base is None else companions(theirs.base, model)
        heads, moments, numbers = heads_near(folder, theirs.base), [], TensorsInMemory({})
    else:
        parts = find_parts(folder, base=theirs.base)
        model, small = whole_model(parts)
        heads, moments = heads_near(parts.model), moments_of(model, folder)
        batch = None if parts.recipe is None else parts.recipe.train.global_batch_size
        numbers = numbers_of(folder, batch) if moments else TensorsInMemory({})
    every = JoinedSource([("", cast(model, wanted.dtype)), *moments])
    return JoinedSource([("", as_mindspore(every, wanted.names, heads)), ("", numbers)]), small


def _is_model(folder: Path, layout: Layout | None) -> bool:
    """Whether it can be opened as a model: weights alone have no configuration."""
    return layout != "huggingface" or files.exists(folder / _CONFIG)
