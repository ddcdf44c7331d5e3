"""Any model, with the state of its training if there is one, for MindSpore Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ....storage import files
from ...disk.commit import named
from ...layouts.detection import detect_layout
from ...layouts.mindspore.layout import MindSpore
from ...layouts.mindspore.mindspore_model import as_mindspore, moments_of, numbers_of
from ...layouts.mindspore.naming.names import heads_near
from ...layouts.mindspore.strategy.parallel_config import ParallelConfig
from ...layouts.mindspore.writing.conversion import TargetFormat, check, rewrite, write
from ...sources.copying import Progress, cast
from ...sources.joined import JoinedSource
from ...sources.source import TensorsInMemory, TensorSource
from ..model_files import companions
from ..origin import Done, DtypeName, Family, Hints, Origin

_CONFIG = "config.json"


@dataclass(frozen=True)
class MindSporeFolder:
    """A folder for MindSpore Transformers, full or by rank."""

    layout: Literal["full", "distributed"] = "full"
    """Layout of the result: full (unsharded tensors), or distributed (one folder of slices per
    rank).
    """

    base: str | None = None
    """The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed)."""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    trust_pickle: bool = False
    """Read the pickles of a checkpoint of DeepSpeed, or of PyTorch's DCP, as inert records."""

    names: Family | None = None
    """What MindSpore Transformers calls the weights, in DST or, with --to huggingface, in SRC;
    keep: as they are."""

    strategy: Path | None = None
    """MindSpore's strategy files of SRC, if not beside its ranks."""

    target_strategy: Path | None = None
    """Strategy files that define how DST is sharded over its ranks."""

    parallel_config: ParallelConfig | None = None
    """How DST is sharded over MindSpore's ranks: data_parallel=2,model_parallel=4,
    pipeline_stage, enable_parallel_optimizer=true, optimizer_weight_shard_size,
    parallel_optimizer_threshold, vocab_emb_dp=false.
    """

    remove_redundancy: bool = False
    """Of slices that several ranks hold, write one."""

    iteration: bool = False
    """With --to mindspore: the newer form of MindSpore Transformers 2.x, iteration_N."""

    @property
    def hints(self) -> Hints:
        """What it says of the folder to convert."""
        return Hints(self.base, self.trust_pickle, None, self.strategy)

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights, and of a run's checkpoint moments and step numbers."""
        wanted = TargetFormat(
            self.layout,
            self.parallel_config,
            self.target_strategy,
            self.names,
            self.dtype,
            self.remove_redundancy,
            self.iteration,
        )
        write_mindspore(origin, target, wanted, progress=progress)
        notes = {"layout": self.layout}
        if self.iteration:
            return Done(notes, f"read it with checkpoint: {{load_path: {target}}}")
        inner = "/checkpoint" if self.layout == "distributed" else ""
        words = f"read it with load_checkpoint: {target}{inner}"
        return Done(notes, f"{words}, load_ckpt_format: safetensors")


def write_mindspore(
    origin: Origin, target: Path, wanted: TargetFormat, *, progress: Progress | None = None
) -> None:
    """Write the content of ``origin`` into the new folder ``target`` in MindSpore's form.

    Moments and step numbers of Surefoot's and MindSpore's checkpoints are included, under the names
    of ``adam_m`` and ``adam_v``.

    Raises:
        CheckpointError: a model whose tensors have no name there, sizes that do not fit it, damaged
            weights, or ``target`` exists.
    """
    check(target, wanted)
    if MindSpore().recognise(origin.folder):
        theirs = replace(origin.mindspore, names=None)
        rewrite(origin.folder, target, wanted, theirs=theirs, progress=progress)
        return
    source, small = _opened(origin, wanted)
    write(source, origin.folder, target, wanted, small=small, progress=progress)


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
    """Whether it can be opened as a model: weights alone have no configuration."""
    layout = detect_layout(folder)
    if layout is None or not layout.is_whole_model:
        return False
    return layout.has_adapter_config or files.exists(folder / _CONFIG)
