"""Conversions, from an ``Origin`` to a ``Target``: ``export`` and ``ckpt convert --to NAME``.

An origin is a folder, views of its weights that targets take, and the small files beside them:
configuration, tokenizer, an adapter's settings. To add a target: write its class, add its line in
``TARGETS``. Those that need more than checkpoints, such as GGUF files, come from plugins.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

from ...errors import CheckpointError, ModelError, counted
from ...extensions import Extended
from ...parallel.sharding import Mesh
from ...schema.named_values import ByteSize
from ...storage import files
from ...storage.files import read_json
from ...storage.memory import only_new_collected
from ...storage.weight_files import adapter_names, is_adapted
from ..disk import strict_json
from ..disk.commit import named, new_folder, write_small
from ..disk.folder import ADAPTER_CONFIG, DISTRIBUTED, companions_of, open_checkpoint
from ..disk.manifest import Kind, Layout
from ..disk.tensorfile import Hashes, plan_save
from ..float32_weights import kept_in_float32, none_kept
from ..layouts.detection import detect_layout, has_manifest, model_near, small_file
from ..layouts.layout import Reading, file_name
from ..layouts.opening import open_folder
from ..sources import DtypeName, Progress, Renamed, TensorSource, cast, copy, fill, silent
from ._resharding import ALONE, reshard, tensors_of_ranks, write_weights

RewardHead = Literal["score", "v_head"]


class OptionError(ValueError):
    """Options of a target that do not go together, or mean nothing for this folder."""


@dataclass(frozen=True)
class WholeModel:
    """A model with its adapter merged, as transformers has it."""

    weights: TensorSource
    small: Mapping[str, bytes]
    folder: Path  # of its configuration
    global_batch_size: int | None = None  # of the run that trained it
    sign: Callable[[Path], object] = lambda _: None
    """Writes a receipt into the new folder, if an export is to have one."""


@dataclass(frozen=True)
class Hints:
    """What the user said of the folder to convert."""

    base: str | None = None
    trust_pickle: bool = False


class Origin(Protocol):
    """A folder to convert. Every view is lazy: a target opens only what it writes."""

    @property
    def folder(self) -> Path:
        """Its path."""

    @property
    def base(self) -> Path | None:
        """The folder of the base that the user named."""

    @property
    def reading(self) -> Reading:
        """How it is read, where its files do not say it."""

    def adapter_base(self) -> Path | None:
        """The folder of an adapter's base; None for a full model."""

    def weights(self) -> TensorSource:
        """The weights as stored, under Hugging Face's names."""

    def single_experts(self) -> tuple[TensorSource, Mapping[str, object]]:
        """The adapter with a matrix for each expert, and its settings."""

    def whole(
        self,
        dtype: DtypeName | None = None,
        *,
        reward_head: RewardHead = "score",
        trust_remote_code: bool = False,
        keeps_unloaded: bool = False,
    ) -> WholeModel:
        """The model; an adapter is merged into its base. ``keeps_unloaded``: with the tensors of
        the base that transformers does not load."""


class Alone(Protocol):
    """What was written, as a program reads it that has nothing else."""

    def prompt_ids(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The ids of a conversation, up to the next response."""

    def text_ids(self, text: str) -> list[int]:
        """The ids of plain text."""

    def ends(self) -> Collection[int]:
        """The tokens that end a response."""


@dataclass(frozen=True)
class Done:
    """Notes about the folder that was written."""

    notes: Mapping[str, object] = field(default_factory=dict)  # for --json
    words: str = ""  # for people
    hashes: Hashes = field(default_factory=dict)  # of files that have none themselves


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """What ``export`` and ``ckpt convert --to NAME`` write. Its fields are their options."""

    suffix: ClassVar[str] = ""
    """Of the file that it writes; empty if it writes a folder."""
    may_not_open: ClassVar[bool] = False
    """Whether transformers cannot open all that it writes, so that a failure is no fault."""
    servers: ClassVar[Sequence[str]] = ()
    """Commands that serve what was written, in place of ``{}``; printed."""
    package: ClassVar[str | None] = None
    """The package of Python that it needs."""

    @property
    def hints(self) -> Hints:
        """What its options say of the folder to convert: those that ``Hints`` has."""
        hints = {hint.name for hint in fields(Hints)}
        return Hints(**{f.name: getattr(self, f.name) for f in fields(self) if f.name in hints})

    @abstractmethod
    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Write the new folder ``target``, which appears when all of it is written."""

    @classmethod
    def open_alone(cls, written: Path, tokenizer: object) -> Alone | None:
        """How others read ``written``; None for a folder of transformers. ``tokenizer`` is the
        run's, for a reader that needs it for its ids."""
        return None

    @classmethod
    def unread_settings(cls, written: Path) -> Mapping[str, object]:
        """Settings of the model in ``written`` that its reader in transformers does not read."""
        return {}


@dataclass(frozen=True, kw_only=True)
class WeightsTarget(Target):
    """The options of a target that is written from the weights in any folder."""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    trust_pickle: bool = False
    """Read the pickles of a checkpoint of DeepSpeed, or of PyTorch's DCP, as inert records."""


@dataclass(frozen=True, kw_only=True)
class ModelTarget(WeightsTarget):
    """The same, where the base of the weights may be named."""

    base: str | None = None
    """The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed)."""


_CONFIG = "config.json"
_OF_RUN = {"state.json", "recipe.yaml", "trainer_state.json"}


def companions(base: Path, source: TensorSource) -> dict[str, bytes]:
    """The companions of the weights in ``base``, its configuration changed to fit ``source``."""
    fitted = configs(base, source) if files.exists(base / _CONFIG) else {}
    return companions_of(base, base) | fitted


def named_as(source: TensorSource, base: Path) -> TensorSource:
    """``source`` under the names that ``base`` uses."""
    base_names, names = set(open_folder(base).shapes()), source.shapes().keys()
    # A module around the model puts its own name before every tensor's. The longest name ends no
    # other one of the model, so what stands before it in ``source`` is that prefix.
    longest = max(base_names, key=len, default="")
    prefix = next((n.removesuffix(longest) for n in names if n.endswith(f".{longest}")), "")
    without_prefix = {name.removeprefix(prefix): name for name in names}
    if not base_names <= names and base_names <= without_prefix.keys():
        source = Renamed(source, without_prefix)
        names = source.shapes().keys()
    if missing := sorted(base_names - names):
        raise CheckpointError(
            f"weights of another model than {base}: of its {counted(len(base_names), 'tensor')} "
            f"{counted(len(missing), 'is', 'are')} missing (for example {missing[0]})"
        )
    return source


def refuse_adapter(folder: Path, source: TensorSource) -> None:
    """Raise ``CheckpointError`` if ``source``, the weights of another tool, has an adapter."""
    if adapter_tensor := next(filter(is_adapted, source.shapes()), None):
        raise CheckpointError(
            f"{folder}: it contains an adapter ({adapter_tensor}); write it with `surefoot ckpt "
            f"convert {folder} ADAPTER --to peft --trust-pickle`, and merge that with `surefoot "
            "export`"
        )


def adapter_files(folder: Path) -> dict[str, bytes]:
    """The companions of an adapter, without the files of the run that trained it."""
    if has_manifest(folder):
        names = [n for n in open_checkpoint(folder).manifest.companions if n not in _OF_RUN]
    else:
        names = [ADAPTER_CONFIG, *companions_of(folder, folder)]
    contents = {name: small_file(folder, name) for name in sorted(names)}
    return {name: data for name, data in contents.items() if data is not None}


def configs(
    folder: Path,
    source: TensorSource,
    changes: Mapping[str, object] | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> dict[str, bytes]:
    """The two configuration files of ``folder`` for ``source``, with ``changes`` to config.json.
    Raises ``ModelError`` if the files of ``folder`` contain quantized weights."""
    changes = changes or {}
    config = {**read_config(folder / _CONFIG), **changes}
    if isinstance(stored := config.get("quantization_config"), dict):
        raise ModelError(
            f"{folder}: its weights are quantized ({stored.get('quant_method')}), so they can be "
            "neither cast nor merged with an adapter; open both with PEFT, or pass the model that "
            "they were made from as --base"
        )
    config.pop("quantization_config", None)  # None: the weights were dequantized
    inner = config.get("text_config")
    if isinstance(inner, dict):
        inner.update({name: value for name, value in changes.items() if name in inner})
    config.pop("torch_dtype", None)  # the old name
    config["dtype"] = _main_dtype(source)
    config_files = {"config.json": _json(config)}
    path = folder / "generation_config.json"
    generation = read_config(path) if path.is_file() else {}
    eos_ids = generation.get("eos_token_id")
    if not isinstance(eos_ids, list):
        eos_ids = [] if eos_ids is None else [eos_ids]
    if eos_ids := list(dict.fromkeys([*eos_ids, *stop_token_ids])):
        generation["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    if generation:
        config_files[path.name] = _json(generation)
    return config_files


def _main_dtype(source: TensorSource) -> str:
    """The type most of the weights have."""
    sizes: dict[torch.dtype, int] = {}
    shapes = source.shapes()
    for name, dtype in source.dtypes().items():
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + prod(shapes[name])
    return str(max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32))[len("torch.") :]


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file beside a model. Raises ``ModelError``."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {str(content)[:40]}")
    return content


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


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
            hints = {"base": self.base, "trust_pickle": self.trust_pickle}
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
            source = cast(source, self.dtype, none_kept)
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
    place = origin.base or model_near(origin.folder)
    source = cast(source, target.dtype, kept_in_float32(place, target.dtype))
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
                self.dtype,
                reward_head=self.reward_head,
                trust_remote_code=self.trust_remote_code,
                keeps_unloaded=True,
            )
            weights, small, sign, words = whole.weights, whole.small, whole.sign, ""
        else:
            weights, small = _foreign_model(origin, self)
            has_model = origin.base is not None or model_near(origin.folder) is not None
            sign, words = None, "" if has_model else _WEIGHTS_ONLY
        with new_folder(target, may_be_empty=sign is not None) as folder:
            size = self.max_shard_size
            hashes = copy(weights, folder, max_shard_size=size, progress=progress)
            write_small(folder, small)
            if sign is not None:
                sign(folder)
        return Done(words=words, hashes=hashes)


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
class PEFTAdapter(ModelTarget):
    """An adapter by itself."""

    experts: Literal["fused", "single"] | None = None
    """Of a mixture: fused (unset), all of a layer in one tensor, as PEFT trains them, or single, a
    matrix for each under the names of the base's files, as vLLM reads them.
    """

    def __post_init__(self) -> None:
        if self.base is not None and self.experts != "single":
            raise OptionError("--base of an adapter by itself needs --experts single")

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """The adapter's weights and settings, without the state of its training."""
        folder, layout = origin.folder, detect_layout(origin.folder)
        is_marked = layout is not None and layout.has_adapter_config
        if is_marked and files.exists(folder / ADAPTER_CONFIG):
            source, small = open_folder(folder), adapter_files(folder)
        else:
            source, small = _inside(folder, origin.weights())
        if self.experts == "single":
            source, settings = origin.single_experts()
            small[ADAPTER_CONFIG] = _json(settings)
        source = cast(source, self.dtype, none_kept)
        with new_folder(target) as part:
            hashes = copy(
                source, part, stem="adapter_model", max_shard_size=None, progress=progress
            )
            write_small(part, small)
        return Done(hashes=hashes)


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


@only_new_collected()
def write_dcp(
    source: TensorSource,
    target: Path,
    *,
    mesh: Mesh = ALONE,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Hashes:
    """Write ``source``, sharded for ``mesh``, into the new folder ``target``, with ``small`` files.
    PyTorch's ``HuggingFaceStorageReader`` reads it, ``consolidate_safetensors_files`` unshards it.
    """
    plans, hashes = [], dict[str, Mapping[str, str]]()
    with new_folder(target) as folder:
        for rank, by_role in enumerate(tensors_of_ranks({"model": source}, mesh)):
            local = by_role["model"]
            tensors = {name: (local[name].dtype, local[name].box.shape) for name in sorted(local)}
            boxes = {name: (t.shape, t.box) for name, t in local.items()}
            plans += plan_save(file_name(rank), tensors, None, boxes=boxes) if tensors else []
        for plan in plans:
            with files.create(folder / plan.name) as file:
                # All are reserved before one is filled, so that a full disk shows at once.
                file.reserve(plan.header.file_size)
        for plan in plans:
            with files.open_file(folder / plan.name, follow=False, write=True) as file:
                file.bypass_cache()
                hashes[plan.name] = fill(file, source, plan, progress or silent)
        write_small(folder, small or {})
    return hashes


@dataclass(frozen=True)
class DCPFolder(WeightsTarget):
    """Weights for distributed checkpoints of PyTorch, ``dcp.load``."""

    mesh: Mesh | None = None
    """The processes whose boxes are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …"""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Boxes for every process of the mesh."""
        kept, mesh = kept_in_float32(origin.folder, self.dtype), self.mesh or Mesh()
        source = cast(origin.weights(), self.dtype, kept)
        small = companions(origin.folder, source)
        hashes = write_dcp(source, target, mesh=mesh, small=small, progress=progress)
        reader = f"HuggingFaceStorageReader({str(target)!r})"
        words = f"read it with dcp.load(..., storage_reader={reader})"
        return Done({"mesh": mesh.axes}, words, hashes)


TARGETS: Extended[type[Target]] = Extended(
    "targets",
    {
        "surefoot": SurefootCheckpoint,
        "huggingface": HuggingFaceModel,
        "peft": PEFTAdapter,
        "dcp": DCPFolder,
    },
)
