"""Write a complete checkpoint in another layout, or for another mesh, from file to file.

Weights, optimizer and the other states are tensor sources. The new files are planned like the save
of a run on that mesh, and filled block by block. So no model is built, no process group is started,
memory does not grow with the model, and every byte is read once and its hash checked at the same
time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CheckpointError
from ...parallel.sharding import Box, Mesh
from ...storage import files
from ...storage.memory import only_new_collected
from ..disk.commit import clean_leftovers, refuse_existing, step_of
from ..disk.folder import CheckpointFolder, FolderWeights, open_checkpoint, places
from ..disk.grid import RANK_FOLDER
from ..disk.manifest import Kind, Layout, Manifest
from ..disk.tensorfile import plan_save
from ..float32_weights import kept_in_float32
from ..layouts.detection import expect_layout
from ..layouts.layout import Native
from ..saving._balancing import LocalTensor, shared_out
from ..saving._writing import Job, Saved, Shard, write
from ..saving.preparation import indexes, now, still_in, versions
from ..sources import FolderSource, Progress, Renamed, TensorSource, cast, described, fill, silent
from ..state.roles import MODEL, FileRole

ALONE = Mesh()
SHARD_SIZE = 5_000_000_000  # bytes of the largest file
_INDEX = ".safetensors.index.json"
_CONFIG = "config.json"


@only_new_collected()
def reshard(
    folder: Path | str,
    target: Path | str,
    *,
    layout: Layout = "full",
    mesh: Mesh = ALONE,
    dtype: str | None = None,
    max_shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
) -> Saved:
    """Write the checkpoint in ``folder`` as a new checkpoint ``target``, atomically.

    A run resumes from both in the same way: bitwise, unless ``dtype`` rounds the weights.

    Args:
        folder: a Surefoot checkpoint.
        target: the new checkpoint, a folder that does not exist.
        layout: ``full``, or ``distributed`` for a folder for every rank of ``mesh``.
        mesh: the ranks whose boxes are written; only in layout ``distributed``.
        dtype: float32, float16 or bfloat16, for the weights; the optimizer state is not changed.
        max_shard_size: of each file, in bytes.
        progress: called with the bytes of each block written.

    Raises:
        CheckpointError: a damaged checkpoint, incompatible options, ``target`` exists, or the disk
            fails.
    """
    path = Path(target).absolute()
    refuse_existing(path)
    if Path(folder).absolute() in path.parents:
        raise CheckpointError(f"{target}: is inside the checkpoint {folder}; choose another folder")
    if layout == "full" and mesh.size > 1:
        raise CheckpointError(
            "a mesh needs layout distributed; layout full is the same for every mesh"
        )
    if not (source_layout := expect_layout(Path(folder))).has_manifest:
        raise CheckpointError(
            f"{folder}: weights only ({source_layout.name}), not a Surefoot checkpoint; `surefoot "
            "ckpt convert --to surefoot` converts it to one, without training state"
        )
    checkpoint = open_checkpoint(Path(folder))
    manifest = checkpoint.manifest
    sources = open_roles(checkpoint)
    kept = kept_in_float32(Path(folder), dtype)
    is_cast = {r: s for r, s in sources.items() if FileRole(r).is_weights}
    sources |= {role: cast(source, dtype, kept) for role, source in is_cast.items()}
    shards = list(shards_of(sources, manifest.kind, layout, mesh, max_shard_size))
    names = [name for name in manifest.companions if not name.endswith(_INDEX)]
    small = {name: checkpoint.small(name) for name in names}
    if dtype is not None and _CONFIG in small:
        small[_CONFIG] = with_dtype(small[_CONFIG], dtype)
    small |= indexes(shards, mesh.size)
    return commit(manifest, sources, shards, small, layout, mesh, path, progress)


def open_roles(checkpoint: CheckpointFolder) -> dict[str, TensorSource]:
    """The tensors of each role of a Surefoot checkpoint, under the names in its files."""
    manifest = checkpoint.manifest
    with files.raising(CheckpointError, f"cannot read {checkpoint.path}"):
        tensors = places(checkpoint, manifest.by_tensor())
    stored = FolderSource(FolderWeights(Native.name, checkpoint.path, tensors))
    return {
        role: Renamed(stored, {name: f"{role}/{name}" for name in manifest.tensors(role)})
        for role in (MODEL, *(role for role in manifest.roles if role != MODEL))
    }


def with_dtype(config: bytes, dtype: str) -> bytes:
    """``config.json`` for weights of another dtype."""
    settings = json.loads(config)
    for section in (settings, settings.get("text_config")):
        if isinstance(section, dict) and ("dtype" in section or section is settings):
            section["dtype"] = dtype
            section.pop("torch_dtype", None)  # the old name
    return (json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def shards_of(
    sources: Mapping[str, TensorSource], kind: Kind, layout: Layout, mesh: Mesh, max_shard_size: int
) -> Iterator[Shard]:
    """The files of every role: of unsharded tensors, or of the boxes of every rank."""
    moments = {name: source.shapes() for name, source in sources.items()}
    apart = [name for name in sources if FileRole(name, kind).is_adapter]
    for name in apart:  # one small file beside the manifest, as PEFT wants it
        (whole,) = tensors_of_ranks({name: sources[name]}, ALONE)
        yield from _planned(FileRole(name, kind), whole[name], None)
    sources = {name: source for name, source in sources.items() if name not in apart}
    for rank, by_role in enumerate(tensors_of_ranks(sources, mesh)):
        for name, tensors in by_role.items():
            role = FileRole(name, kind)
            yield from _planned(
                role,
                tensors,
                max_shard_size,
                moments=moments.get(role.optimizer, {}),
                rank=rank if layout == "distributed" else None,
            )


def tensors_of_ranks(
    sources: Mapping[str, TensorSource], mesh: Mesh
) -> list[dict[str, dict[str, LocalTensor]]]:
    """What each rank writes, by role and name; rank 0 alone those of other states."""
    of_ranks: list[dict[str, dict[str, LocalTensor]]] = [
        {r: {} for r in sources} for _ in range(mesh.size)
    ]
    for role, source in sources.items():
        for name, (dtype, shape) in described(source).items():
            is_sharded = not FileRole(role).is_of_rank_0
            boxes = mesh.boxes(shape) if is_sharded else [((0,), Box.whole(shape))]
            for ranks, box in boxes:
                tensor = LocalTensor(dtype, shape, box)
                for rank in ranks:
                    of_ranks[rank][role][name] = tensor
    return [
        {
            role: {n: replace(local[role][n], box=box) for n, box in share.get(role, {}).items()}
            for role in sources
        }
        for local, share in zip(of_ranks, shared_out(of_ranks), strict=True)
    ]


def _planned(
    role: FileRole,
    local: Mapping[str, LocalTensor],
    max_shard_size: int | None,
    *,
    moments: Collection[str] = (),
    rank: int | None = None,
) -> list[Shard]:
    """The files of one role, if distributed of one ``rank``; ``moments`` as in ``still_in``."""
    tensors = {name: (local[name].dtype, local[name].box.shape) for name in sorted(local)}
    if not tensors:
        return []
    boxes = None if rank is None else {name: (t.shape, t.box) for name, t in local.items()}
    stem = role.stem if rank is None else f"{RANK_FOLDER.format(rank)}/{role.stem}"
    limit = max_shard_size if role.is_split_by_size else None
    plans = plan_save(stem, tensors, limit, apart=still_in(role, tensors, moments), boxes=boxes)
    return [Shard(role.name, plan) for plan in plans]


def commit(
    manifest: Manifest,
    sources: Mapping[str, TensorSource],
    shards: Sequence[Shard],
    small: Mapping[str, bytes],
    layout: Layout,
    mesh: Mesh,
    target: Path,
    progress: Progress | None,
) -> Saved:
    """Write ``shards`` of ``sources``, which are by role, as the new checkpoint ``target``."""
    if step_of(target) not in (-1, manifest.step):
        raise CheckpointError(
            f"{target}: the checkpoint is that of step {manifest.step}; choose the name "
            f"checkpoint-{manifest.step}, or one without a step"
        )
    job = Job(
        root=target.parent,
        name=target.name,
        step=manifest.step,
        kind=manifest.kind,
        created=now(),
        versions=versions(),
        shards=shards,
        small=small,
        parent=manifest.parent,
        layout=layout,
        world_size=mesh.size,
        mesh=mesh.axes,
        share=False,
    )
    clean_leftovers(target)
    return write(job, _SourceContent(sources, progress or silent))


def write_weights(
    source: TensorSource,
    target: Path | str,
    *,
    kind: Kind = "full",
    layout: Layout = "full",
    mesh: Mesh = ALONE,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Write ``source``, under Hugging Face's names (of ``kind`` adapter: PEFT's), as a Surefoot
    checkpoint ``target``, atomically, with ``small`` files.

    A run may start from such a weights-only checkpoint, of step 0, but not resume from it.
    """
    path = Path(target).absolute()
    refuse_existing(path)
    sources = {"model": source}
    shards = list(shards_of(sources, kind, layout, mesh, SHARD_SIZE))
    manifest = Manifest(step=0, kind=kind, created="", versions={}, files={}, hashes={}, pieces=())
    others = {**(small or {}), **indexes(shards, mesh.size)}
    return commit(manifest, sources, shards, others, layout, mesh, path, progress)


@dataclass(frozen=True)
class _SourceContent:
    """The content of files that are filled from sources."""

    sources: Mapping[str, TensorSource]
    progress: Progress

    def write(self, shard: Shard, file: files.File) -> Mapping[str, str]:
        return fill(file, self.sources[shard.role], shard.plan, self.progress)

    def hash(self, shard: Shard, name: str) -> str:
        raise AssertionError(name)  # nothing is shared with a parent

    def blocks(self, shard: Shard, name: str, size: int) -> list[str]:
        raise AssertionError(name)  # one process writes pieces
