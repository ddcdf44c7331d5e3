"""The target ``mindspore`` of ``ckpt convert``: which of MindSpore's forms is written, under which
names, from MindSpore's own folder or from any other weights; ``writing`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...checkpoint.converting.targets import Done, ModelTarget, Origin, companions
from ...checkpoint.disk.commit import named, refuse_taken
from ...checkpoint.disk.folder import companions_of, open_checkpoint
from ...checkpoint.float32_weights import kept_in_float32
from ...checkpoint.layouts.detection import detect_layout, has_manifest
from ...checkpoint.sources import (
    DtypeName,
    JoinedSource,
    Progress,
    TensorsInMemory,
    TensorSource,
    cast,
)
from ...errors import CheckpointError
from ...storage import files
from .model import (
    as_huggingface,
    as_mindspore,
    by_role,
    moments_of,
    numbers_of,
    open_state,
)
from .naming import heads_near
from .opening import LAYOUT, form_of
from .ranks import model_near, rank_files, step_of
from .reading import KEEP, FamilyName
from .strategy import open_strategy
from .tensor_layout import ParallelConfig
from .writing import Naming, sorted_out, write_distributed, write_full, write_iteration

_CONFIG = "config.json"
_Opened = tuple[TensorSource, Mapping[str, bytes]]  # under MindSpore's names; companion files


@dataclass(frozen=True, kw_only=True)
class MindSporeFolder(ModelTarget):
    """A folder for MindSpore Transformers, full or by rank."""

    layout: Literal["full", "distributed"] = "full"
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

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights and, of checkpoints of Surefoot and MindSpore, moments and step numbers."""
        refuse_taken(target)
        is_sharded = self.parallel_config is not None or self.target_strategy is not None
        if (self.layout == "distributed") != is_sharded:
            raise CheckpointError(
                "layout distributed needs a parallel_config or strategy files; layout full needs "
                "neither"
            )
        is_mindspore = detect_layout(origin.folder) == LAYOUT
        source, small = self._from_mindspore(origin) if is_mindspore else self._from_others(origin)
        stages, naming = None, _naming_of(origin.folder)
        if self.target_strategy is not None:
            stages = open_strategy(self.target_strategy).stages
        elif self.parallel_config is not None:
            stages = self.parallel_config.stages(sorted_out(source)[0])
        if self.iteration:
            hashes = write_iteration(
                source,
                target,
                stages=stages,
                prefix=naming.prefix,
                remove_redundancy=self.remove_redundancy,
                small=small,
                progress=progress,
            )
        elif stages is None:
            hashes = write_full(source, target, small=small, progress=progress)
        else:
            hashes = write_distributed(
                source,
                target,
                stages=stages,
                naming=naming,
                remove_redundancy=self.remove_redundancy,
                small=small,
                progress=progress,
            )
        notes = {"layout": self.layout}
        if self.iteration:
            return Done(notes, f"read it with checkpoint: {{load_path: {target}}}", hashes)
        inner = "/checkpoint" if self.layout == "distributed" else ""
        words = f"read it with load_checkpoint: {target}{inner}"
        return Done(notes, f"{words}, load_ckpt_format: safetensors", hashes)

    def _from_mindspore(self, origin: Origin) -> _Opened:
        """MindSpore's own content, under other names if requested."""
        folder, base = origin.folder, origin.base
        layout = LAYOUT.read_as(origin.reading)
        parts = by_role(open_state(folder, base, layout))
        kept = kept_in_float32(base or model_near(folder), self.dtype)
        source: TensorSource = JoinedSource(
            [("", cast(parts["model"], self.dtype, kept)), ("", parts["optimizer"])]
        )
        if self.names not in (None, KEEP):
            heads = heads_near(folder, base)
            source = as_mindspore(as_huggingface(source, folder, base, layout), self.names, heads)
        # Configuration and tokenizer of the base, or those beside the weights.
        is_model = base is not None and files.exists(base / _CONFIG)
        model = base if is_model else model_near(folder)
        small: dict[str, bytes] = {}
        if model is not None:
            small = companions_of(model, model) | {_CONFIG: files.read_file(model / _CONFIG)}
        return JoinedSource([("", source), ("", parts["state"])]), small

    def _from_others(self, origin: Origin) -> _Opened:
        """Weights of any other folder; of a checkpoint also moments and step numbers."""
        folder, layout = origin.folder, detect_layout(origin.folder)
        # Mere weights have no configuration, and cannot be opened as a model.
        is_model = layout is not None and layout.is_whole_model
        has_config = layout is not None and layout.has_adapter_config
        small: Mapping[str, bytes]
        if not named(folder) and not (is_model and (has_config or files.exists(folder / _CONFIG))):
            model = origin.weights()
            small = {} if origin.base is None else companions(origin.base, model)
            heads, moments, numbers = heads_near(folder, origin.base), [], TensorsInMemory({})
        else:
            whole = origin.whole()
            model, small = whole.weights, whole.small
            heads, moments = heads_near(whole.folder), moments_of(model, folder)
            batch_size = whole.global_batch_size
            numbers = numbers_of(folder, batch_size) if moments else TensorsInMemory({})
        kept = kept_in_float32(origin.base or folder, self.dtype)
        weights = JoinedSource([("", cast(model, self.dtype, kept)), *moments])
        renamed = as_mindspore(weights, self.names, heads)
        return JoinedSource([("", renamed), ("", numbers)]), small


def _naming_of(folder: Path) -> Naming:
    """The names of the files of ranks that come from ``folder``: after the step it was saved at."""
    if has_manifest(folder):
        return Naming(step=open_checkpoint(folder).manifest.step)
    if form_of(folder) == "ranks" and (step := step_of(rank_files(folder)[0].name)) is not None:
        return Naming(step.prefix, step.epoch, step.step)
    return Naming()
