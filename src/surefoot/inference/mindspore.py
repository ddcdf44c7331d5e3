"""Any model, with the state of its training if there is one, as MindSpore Transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .. import files
from ..checkpoint.beside import Beside
from ..checkpoint.commit import named
from ..checkpoint.copy import cast
from ..checkpoint.mindspore.names import KEEP, heads_near
from ..checkpoint.mindspore.parallel import ParallelConfig
from ..checkpoint.mindspore.ranks import root_of
from ..checkpoint.mindspore.strategy import Layouts, open_strategy
from ..checkpoint.mindspore.write import write_distributed, write_full
from ..checkpoint.mindspore.write_iteration import write_iteration
from ..checkpoint.source import Memory, Source
from ..checkpoint.weights import Layout, recognise
from ..checkpoint.whole import refuse_taken
from ..errors import CheckpointError
from ..interchange.dcp import open_source
from ..interchange.mindspore import (
    NOTHING_MORE,
    Theirs,
    as_huggingface,
    as_mindspore,
    by_role,
    moments_of,
    naming_of,
    numbers_of,
    open_state,
    stages_for,
)
from .exported import DtypeName, beside, whole_model
from .opened import find_parts
from .rewritten import companions

Form = Literal["full", "distributed"]
Progress = Callable[[int], None]
_CONFIG = "config.json"


@dataclass(frozen=True)
class Wanted:
    """What is to be written."""

    form: Form = "full"
    config: ParallelConfig | None = None  # whose ranks' slices
    like: Path | None = None  # the same, by strategy files
    names: str | None = None  # a family, or keep; None: the usual one, or as they are
    dtype: DtypeName | None = None  # of the weights
    remove_redundancy: bool = False  # of equal slices write one
    is_iteration: bool = False  # in the newer form of MindSpore Transformers 2.x


def write_mindspore(
    folder: Path,
    target: Path,
    wanted: Wanted,
    *,
    theirs: Theirs = NOTHING_MORE,
    trust_pickle: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write what is in ``folder`` into the new folder ``target`` as MindSpore keeps it.

    Moments and step numbers of checkpoints of ours and MindSpore's come along, under the names of
    ``adam_m`` and ``adam_v``.

    Raises:
        CheckpointError: a model whose tensors have no name there, sizes that do not fit it, damaged
            weights, or ``target`` exists.
    """
    refuse_taken(target)
    if (wanted.form == "distributed") != (wanted.config is not None or wanted.like is not None):
        raise CheckpointError(
            "layout distributed takes a parallel_config or the strategy files to cut by; "
            "layout full takes neither"
        )
    source, small = _opened(folder, wanted, theirs, trust_pickle)
    if wanted.is_iteration:
        stages = _stages(source, wanted) if wanted.form == "distributed" else [None]
        if len(stages) > 1:
            raise CheckpointError(
                "an iteration_N folder of several pipeline stages is not written here; "
                "take pipeline_stage=1, into which MindSpore Transformers reshards as it loads"
            )
        write_iteration(
            source,
            target,
            layouts=stages[0],
            prefix=naming_of(folder).prefix,
            remove_redundancy=wanted.remove_redundancy,
            small=small,
            progress=progress,
        )
        return
    if wanted.form == "full":
        write_full(source, target, small=small, progress=progress)
        return
    write_distributed(
        source,
        target,
        stages=_stages(source, wanted),
        naming=naming_of(folder),
        remove_redundancy=wanted.remove_redundancy,
        small=small,
        progress=progress,
    )


def _stages(source: Source, wanted: Wanted) -> Sequence[Layouts]:
    if wanted.like is not None:
        return open_strategy(wanted.like).stages
    return stages_for(source, wanted.config or ParallelConfig())


def _opened(
    folder: Path, wanted: Wanted, theirs: Theirs, trust_pickle: bool
) -> tuple[Source, Mapping[str, bytes]]:
    """Everything under MindSpore's names, and the small files to lie beside."""
    with files.raising(CheckpointError):
        layout = recognise(folder)
    if layout == "mindspore":
        return _renamed(folder, wanted, theirs), _small(folder, theirs)
    if not named(folder) and (layout in (None, "dcp") or not _is_model(folder, layout)):
        model = open_source(folder, trust_pickle=trust_pickle)
        small = {} if theirs.base is None else companions(theirs.base, model)
        heads, moments, numbers = heads_near(folder, theirs.base), [], Memory({})
    else:
        parts = find_parts(folder, base=theirs.base)
        model, small = whole_model(parts)
        heads, moments = heads_near(parts.model), moments_of(model, folder)
        batch = None if parts.recipe is None else parts.recipe.train.global_batch_size
        numbers = numbers_of(folder, batch) if moments else Memory({})
    every = Beside([("", cast(model, wanted.dtype)), *moments])
    return Beside([("", as_mindspore(every, wanted.names, heads)), ("", numbers)]), small


def _is_model(folder: Path, layout: Layout | None) -> bool:
    """Whether it can be opened as a model: weights alone have no configuration."""
    return layout != "huggingface" or files.exists(folder / _CONFIG)


def _renamed(folder: Path, wanted: Wanted, theirs: Theirs) -> Source:
    """MindSpore's own content, under other names if these are asked for."""
    parts = by_role(open_state(folder, theirs))
    cut: Source = Beside([("", cast(parts["model"], wanted.dtype)), ("", parts["optimizer"])])
    if wanted.names not in (None, KEEP):
        plain = as_huggingface(cut, folder, replace(theirs, names=None))
        cut = as_mindspore(plain, wanted.names, heads_near(folder, theirs.base))
    return Beside([("", cut), ("", parts["state"])])


def _small(folder: Path, theirs: Theirs) -> Mapping[str, bytes]:
    """The configuration and tokenizer of the base, or those that lie beside already."""
    places = (theirs.base, folder, root_of(folder), root_of(folder).parent)
    for place in places:
        if place is not None and files.exists(place / _CONFIG):
            return beside(place, place) | {_CONFIG: (place / _CONFIG).read_bytes()}
    return {}
