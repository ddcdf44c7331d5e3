"""Convert one of MindSpore's forms to another, and write any tensor source in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ....checkpoint.disk.commit import refuse_taken
from ....checkpoint.disk.folder import companions_of
from ....checkpoint.sources.copying import DtypeName, Progress, cast
from ....checkpoint.sources.source import JoinedSource, TensorSource
from ....errors import CheckpointError
from ....storage import files
from ..model import MindSporeHints, as_huggingface, as_mindspore, by_role, naming_of, open_state
from ..naming.names import KEEP, FamilyName, heads_near
from ..reading.ranks import model_near
from ..strategy.parallel_config import ParallelConfig
from ..strategy.strategy_files import Layouts, open_strategy
from .iteration_files import write_iteration
from .rank_files import sorted_out, write_distributed, write_full

Form = Literal["full", "distributed"]
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class TargetFormat:
    """The form to write."""

    layout: Form = "full"
    """full (unsharded tensors), or distributed (one folder of shards per rank)."""

    parallel_config: ParallelConfig | None = None
    """How DST is sharded over MindSpore's ranks: data_parallel=2,model_parallel=4,
    pipeline_stage, enable_parallel_optimizer=true, optimizer_weight_shard_size,
    parallel_optimizer_threshold, vocab_emb_dp=false.
    """

    target_strategy: Path | None = None
    """Strategy files that define how DST is sharded over its ranks."""

    names: FamilyName | None = None
    """The family of names in DST; keep: as they are; unset: the usual one."""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    remove_redundancy: bool = False
    """Write a slice that several ranks share only once."""

    iteration: bool = False
    """With --to mindspore: the newer form of MindSpore Transformers 2.x, iteration_N."""


def check(target: Path, wanted: TargetFormat) -> None:
    """Reject a target that exists, and a form that does not support its options."""
    refuse_taken(target)
    if (wanted.layout == "distributed") != (
        wanted.parallel_config is not None or wanted.target_strategy is not None
    ):
        raise CheckpointError(
            "layout distributed needs a parallel_config or strategy files; layout full needs "
            "neither"
        )


def rewrite(
    folder: Path,
    target: Path,
    wanted: TargetFormat,
    *,
    theirs: MindSporeHints,
    progress: Progress | None = None,
) -> None:
    """Write all that MindSpore saved in ``folder`` into the new folder ``target``."""
    source = _renamed(folder, wanted, theirs)
    write(source, folder, target, wanted, small=_small(folder, theirs), progress=progress)


def write(
    source: TensorSource,
    folder: Path,
    target: Path,
    wanted: TargetFormat,
    *,
    small: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write ``source``, which came from ``folder`` and has MindSpore's names."""
    if wanted.iteration:
        write_iteration(
            source,
            target,
            stages=_stages(source, wanted) if wanted.layout == "distributed" else None,
            prefix=naming_of(folder).prefix,
            remove_redundancy=wanted.remove_redundancy,
            small=small,
            progress=progress,
        )
        return
    if wanted.layout == "full":
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


def _stages(source: TensorSource, wanted: TargetFormat) -> Sequence[Layouts]:
    if wanted.target_strategy is not None:
        return open_strategy(wanted.target_strategy).stages
    return (wanted.parallel_config or ParallelConfig()).stages(sorted_out(source)[0])


def _renamed(folder: Path, wanted: TargetFormat, theirs: MindSporeHints) -> TensorSource:
    """MindSpore's own content, under other names if requested."""
    parts = by_role(open_state(folder, theirs))
    cut: TensorSource = JoinedSource(
        [("", cast(parts["model"], wanted.dtype)), ("", parts["optimizer"])]
    )
    if wanted.names not in (None, KEEP):
        plain = as_huggingface(cut, folder, replace(theirs, names=None))
        cut = as_mindspore(plain, wanted.names, heads_near(folder, theirs.base))
    return JoinedSource([("", cut), ("", parts["state"])])


def _small(folder: Path, theirs: MindSporeHints) -> Mapping[str, bytes]:
    """The configuration and tokenizer of the base, or those beside the weights."""
    own = theirs.base if theirs.base and files.exists(theirs.base / _CONFIG) else None
    place = own or model_near(folder)
    if place is None:
        return {}
    return companions_of(place, place) | {_CONFIG: (place / _CONFIG).read_bytes()}
