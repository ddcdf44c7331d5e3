"""What ``export`` and ``ckpt convert --to NAME`` write. To add one: write its class, add its line.

Targets that need more than checkpoints, such as GGUF files, come from plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, ModelError
from ...extensions import Extended
from ...parallel.sharding import Mesh
from ...schema.named_values import ByteSize
from ...storage import files
from ...storage.weight_files import adapter_names, is_adapted
from ..disk import strict_json
from ..disk.commit import named, new_folder, write_small
from ..disk.manifest import Kind, Layout
from ..disk.tensorfile import plan_save
from ..layouts.detection import detect_layout, model_near
from ..layouts.layout import file_name
from ..layouts.opening import open_folder
from ..sources.copying import Progress, cast, copy, fill, silent
from ..sources.source import Renamed, TensorSource
from ..sources.weights import ADAPTER_CONFIG, DISTRIBUTED
from ._resharding import ALONE, reshard, tensors_of_ranks, write_weights
from .origin import (
    Done,
    ModelTarget,
    OptionError,
    Origin,
    RewardHead,
    Target,
    WeightsTarget,
    adapter_files,
    companions,
    named_as,
    refuse_adapter,
)


@dataclass(frozen=True)
class SurefootCheckpoint(ModelTarget):
    """A Surefoot checkpoint: another layout or mesh, or the weights of other tools."""

    layout: Layout | None = None
    """Layout of the Surefoot checkpoint: full (unsharded tensors), or distributed (one folder of
    shards per rank), which is the default with a mesh.
    """

    mesh: Mesh | None = None
    """The processes whose boxes are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …"""

    def __post_init__(self) -> None:
        if self.mesh and self.layout == "full":
            raise OptionError("--mesh needs --layout distributed; layout full is not sharded")

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """All of a Surefoot checkpoint; of other folders the weights."""
        layout: Layout = self.layout or ("distributed" if self.mesh else "full")
        mesh = self.mesh or Mesh()
        notes, folder = {"layout": layout, "mesh": mesh.axes}, origin.folder
        of_folder = detect_layout(folder)
        if named(folder) or (of_folder is not None and of_folder.has_manifest):
            hints = {"base": self.base, **origin.reading, "trust_pickle": self.trust_pickle}
            if useless := [name for name, value in hints.items() if value]:
                raise OptionError(
                    f"--{useless[0].replace('_', '-')} cannot be used with a Surefoot checkpoint, "
                    "which contains all that is needed"
                )
            reshard(folder, target, layout=layout, mesh=mesh, dtype=self.dtype, progress=progress)
            return Done(notes, f"resume from it with checkpoint.resume={target}")
        kind: Kind = "full"
        if of_folder is not None and of_folder.is_adapter:
            kind, source, small = "adapter", origin.weights(), adapter_files(folder)
            source = cast(source, self.dtype)
        else:
            source, small = _foreign_model(origin, self)
        write_weights(
            source, target, kind=kind, layout=layout, mesh=mesh, small=small, progress=progress
        )
        setting = "adapter" if kind == "adapter" else "path"
        return Done(notes, f"weights only: start a run from them with model.{setting}={target}")


def _foreign_model(origin: Origin, target: ModelTarget) -> tuple[TensorSource, dict[str, bytes]]:
    """The model of another tool, and the files beside it, if its configuration is known."""
    source = origin.weights()
    refuse_adapter(origin.folder, source)
    if origin.base is not None:
        source = named_as(source, origin.base)
    source, place = cast(source, target.dtype), origin.base or model_near(origin.folder)
    return source, {} if place is None else companions(place, source)


@dataclass(frozen=True)
class HuggingFaceModel(ModelTarget):
    """Weights, configuration and tokenizer; an adapter is merged into its base."""

    max_shard_size: ByteSize = ByteSize(5_000_000_000)
    """Largest weight file, such as 500MB; unset, 5GB. Larger models are split."""

    reward_head: RewardHead = "score"
    """Of a reward model: score (unset), in the layout of AutoModelForSequenceClassification, or a
    file with v_head beside a language model, as other trainers read it. Of a model with the
    values of stage: ppo, v_head writes them, too.
    """

    trust_remote_code: bool = False
    """Run code that comes with the model."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """A full model; weights only if there is no configuration."""
        layout = detect_layout(origin.folder)
        if named(origin.folder) or (layout is not None and layout.is_whole_model):
            refuse_taken(target)
            whole = origin.whole(
                self.dtype, reward_head=self.reward_head, trust_remote_code=self.trust_remote_code
            )
            weights, small, sign, words = whole.weights, whole.small, whole.sign, ""
        else:
            weights, small = _foreign_model(origin, self)
            has_model = origin.base is not None or model_near(origin.folder) is not None
            sign, words = None, "" if has_model else _WEIGHTS_ONLY
        with new_folder(target, may_be_empty=sign is not None) as folder:
            copy(weights, folder, max_shard_size=self.max_shard_size, progress=progress)
            write_small(folder, small)
            if sign is not None:
                sign(folder)
        return Done(words=words)


_WEIGHTS_ONLY = (
    "weights only: its config.json and tokenizer are those of the model it comes from; "
    "--base MODEL copies them"
)


def refuse_taken(out: Path) -> None:
    """Raise ``ModelError`` unless ``out`` is free or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if files.exists(out):
        raise ModelError(f"{out}: it exists already, and nothing is overwritten; choose another")


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
        with new_folder(target) as part:
            copy(source, part, stem="adapter_model", max_shard_size=None, progress=progress)
            write_small(part, small)
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


def write_dcp(
    source: TensorSource,
    target: Path,
    *,
    mesh: Mesh = ALONE,
    dtype: str | None = None,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``source``, sharded for ``mesh``, into the new folder ``target``, with ``small`` files.
    PyTorch's ``HuggingFaceStorageReader`` reads it, ``consolidate_safetensors_files`` unshards it.
    """
    source, plans = cast(source, dtype), []
    with new_folder(target) as folder:
        for rank, by_role in enumerate(tensors_of_ranks({"model": source}, mesh)):
            local = by_role["model"]
            tensors = {name: (local[name].dtype, local[name].box.shape) for name in sorted(local)}
            boxes = {name: (t.shape, t.box) for name, t in local.items()}
            plans += plan_save(file_name(rank), tensors, None, boxes=boxes) if tensors else []
        for plan in plans:
            with files.create(folder / plan.name) as file:
                file.reserve(plan.header.file_size)
        for plan in plans:
            with files.open_file(folder / plan.name, follow=False, write=True) as file:
                file.bypass_cache()
                fill(file, source, plan, progress or silent)
        write_small(folder, small or {})


@dataclass(frozen=True)
class DCPFolder(WeightsTarget):
    """Weights for distributed checkpoints of PyTorch, ``dcp.load``."""

    mesh: Mesh | None = None
    """The processes whose boxes are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …"""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Boxes for every process of the mesh."""
        source, mesh = origin.weights(), self.mesh or Mesh()
        small = companions(origin.folder, source)
        write_dcp(source, target, mesh=mesh, dtype=self.dtype, small=small, progress=progress)
        reader = f"HuggingFaceStorageReader({str(target)!r})"
        return Done({"mesh": mesh.axes}, f"read it with dcp.load(..., storage_reader={reader})")


TARGETS: Extended[type[Target]] = Extended(
    "targets",
    {
        "surefoot": SurefootCheckpoint,
        "huggingface": HuggingFaceModel,
        "peft": PEFTAdapter,
        "dcp": DCPFolder,
    },
)

READING: Mapping[str, type] = Extended("reading", {})
"""Options for reading a folder, by its layout: a dataclass each."""
