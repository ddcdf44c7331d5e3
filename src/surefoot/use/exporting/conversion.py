"""Write a model in any form: every target, and the views of a folder that need models to be
located.

Weights are copied from file to file box by box, so that memory does not grow with the model. What
is written appears when all of it is there. The second half merges an adapter into its base.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...checkpoint.converting.targets import (
    Done,
    Hints,
    HuggingFaceModel,
    Origin,
    RewardHead,
    Target,
    WholeModel,
    configs,
    read_config,
)
from ...checkpoint.disk.folder import companions_of
from ...checkpoint.disk.manifest import MANIFEST
from ...checkpoint.disk.tensorfile import open_path
from ...checkpoint.float32_weights import kept_in_float32, none_kept
from ...checkpoint.layouts.adapter_merge import (
    PREFIX,
    TOKENS,
    AsLoRA,
    ExpertSlice,
    Updated,
    merged,
    same_values,
)
from ...checkpoint.layouts.detection import detect_layout, is_sequence_classification
from ...checkpoint.layouts.layout import AS_STORED, Reading
from ...checkpoint.layouts.opening import has_opener, open_any, open_folder, open_named
from ...checkpoint.sources import (
    DtypeName,
    JoinedSource,
    Progress,
    Renamed,
    Shape,
    TensorSource,
    cast,
    rounded,
    silent,
)
from ...checkpoint.verification import verify
from ...data.section import without_datasets
from ...data.text.codec import Codec
from ...data.text.templates import load_template, saved_source
from ...errors import CheckpointError, ModelError, first_line
from ...methods import METHODS
from ...methods.adapter import AdapterMethod
from ...model.adapter_files import attach_empty, config_value
from ...model.config import (
    CONFIG,
    NO_MODEL_AT_ALL,
    ROPE,
    auto_class,
    changed_config,
    extension_of,
    is_dequantized_here,
    old_layers,
    old_rope,
    why_no_model,
)
from ...model.section import ModelSection
from ...model.tokenizer import TOKENIZER_CONFIG, load_tokenizer
from ...model.unloaded_tensors import num_added_layers, unloaded
from ...model.weight_matrices import adapted
from ...model.weights import FullWeights, names_in_files, names_unless_split, places
from ...network.shard_loading import meta_twin, open_base
from ...parallel.sharding import Box
from ...recipe.files import ADAPTER
from ...recipe.run_recipe import Damaged
from ...run.card import write_card
from ...storage import files
from ...storage.memory import only_new_collected
from .._model_location import locate
from ..model_loading import ModelFolders, find_parts, with_valid
from ._reward_model import as_sequence_classification, head_of, v_head_file
from .adapter_names import single_experts
from .opened_alone import read_alone
from .receipt import Artefact, write_receipt

USUAL = "surefoot"  # where only a layout or mesh is named


@dataclass(frozen=True)
class FolderToConvert:
    """A folder, and what the user said of it."""

    folder: Path
    given: Hints = field(default_factory=Hints)
    exported: ModelFolders | None = None  # of an export: what was found
    reading: Reading = field(default_factory=dict)

    @cached_property
    def base(self) -> Path | None:
        """Where ``--base`` leads to."""
        if self.given.base is None:
            return None
        # Weights of another program need the base's configuration alone, and often have no other.
        folder = Path(self.given.base).expanduser()
        if files.exists(folder / CONFIG):
            return folder
        return locate(self.given.base, reading=self.reading).folder

    def adapter_base(self) -> Path | None:
        """The folder of an adapter's base; None for a full model."""
        return None if self.parts.adapter is None else self.parts.model

    @cached_property
    def parts(self) -> ModelFolders:
        """The folders of the model."""
        base, reading = self.given.base, self.reading
        return self.exported or find_parts(self.folder, base=base, reading=reading)

    def weights(self) -> TensorSource:
        """The weights as stored, under Hugging Face's names."""
        if has_opener(self.folder):
            return open_named(self.folder, self.base, self.reading)
        return open_any(self.folder, trust_pickle=self.given.trust_pickle)

    def single_experts(self) -> tuple[TensorSource, Mapping[str, object]]:
        """The adapter with a matrix for each expert, and its settings. Raises ``CheckpointError``
        if it cannot have them."""
        adapter, base = self.parts.adapter, self.parts.model
        if adapter is None:
            raise CheckpointError(f"{self.folder}: it contains no adapter")
        updated = updated_tensors(meta_model(base, trust_remote_code=False), adapter)
        settings, shapes = read_config(adapter / ADAPTER), open_folder(base).shapes()
        return single_experts(open_folder(adapter), settings, updated, shapes)

    def whole(
        self,
        dtype: DtypeName | None = None,
        *,
        reward_head: RewardHead = "score",
        trust_remote_code: bool = False,
        keeps_unloaded: bool = False,
    ) -> WholeModel:
        """The model; an adapter is merged into its base."""
        parts = self.parts
        weights, small = whole_model(
            parts,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            reward_head=reward_head,
            keeps_unloaded=keeps_unloaded,
        )

        def sign(folder: Path) -> None:
            if self.exported is not None:
                artefact = artefact_of(parts, weights, small, dtype, reward_head)
                write_receipt(folder, parts, artefact)

        return WholeModel(weights, small, parts.model, parts.global_batch_size, sign)


def model_folders(origin: Origin) -> ModelFolders:
    """The folders of the model that is written."""
    assert isinstance(origin, FolderToConvert)
    return origin.parts


def export(
    path: str | Path,
    out: str | Path,
    to: Target = HuggingFaceModel(),  # noqa: B008
    *,
    progress: Progress = silent,
) -> Path:
    """Write the model at ``path`` (see ``locate``) as ``to`` says.

    Args:
        path: a run, checkpoint or model; an adapter is merged into its base.
        out: a folder that does not exist or is empty, or a new file.
        to: what is written, and with which options.
        progress: called with numbers of bytes that have been written.

    Raises:
        ModelError: nothing to export there, a missing base, or ``out`` is not empty.
        CheckpointError: damaged weights, an adapter of another model, or a write that fails.
    """
    return export_as(path, out, to, progress)[0]


def export_as(
    path: str | Path,
    out: str | Path,
    to: Target,
    progress: Progress,
    reading: Reading = AS_STORED,
) -> tuple[Path, Done]:
    """The same, with the notes of the target; ``reading`` as in ``locate``."""
    target = Path(out).expanduser().absolute()

    def find(damaged: Damaged) -> ModelFolders:
        return find_parts(path, base=to.hints.base, damaged=damaged, reading=reading)

    def write(parts: ModelFolders) -> Done:
        origin = FolderToConvert(parts.folder, to.hints, parts, parts.reading)
        done = to.write(origin, target, progress)
        if target.is_dir():  # people may edit it, so it is no part of the receipt
            write_card(target, parts.folder)
        return done

    return target, with_valid(find, write)


@only_new_collected()
def convert(
    folder: Path,
    target: Path,
    to: Target,
    progress: Progress = silent,
    reading: Reading = AS_STORED,
) -> Done:
    """Write ``folder`` as ``to`` says into the new folder ``target``, from file to file: no model
    is built, and memory does not grow with it. Raises ``CheckpointError`` or ``ModelError`` for
    damaged weights, a base that is missing, or a write that fails, ``OptionError`` for options that
    mean nothing for this folder."""
    origin = FolderToConvert(folder, to.hints, reading=reading)
    done = to.write(origin, target, progress)
    # An adapter alone has no config.json, which says where responses end: its base has.
    if files.exists(folder / TOKENIZER_CONFIG) and files.exists(target / CONFIG):
        parts = ModelFolders(folder, None, folder, None)
        for line in read_alone(target, Artefact("huggingface", "", 0), parts).differences:
            logger.warning("%s by itself: %s", target, line)
    if files.exists(target / ADAPTER) and not files.exists(target / MANIFEST):
        write_card(target, folder)
    return done


def verify_conversion(target: Path, done: Done) -> None:
    """Hold ``target`` to the names and hashes with which it was written; no model is loaded. Raises
    ``CheckpointError``, and deletes it, if it reads otherwise."""
    problems = list(verify(target).problems)
    for name, hashes in done.hashes.items():
        with open_path(target / name) as file:
            names = file.header.entries.keys()
            if names != hashes.keys() or any(file.hash(n) != hashes[n] for n in hashes):
                problems.append(f"{target / name}: its tensors are not those that were written")
    if problems:
        files.remove_tree(target)
        raise CheckpointError(f"{problems[0]}; {target} is deleted, check the disk and try again")


logger = logging.getLogger(__name__)


def num_weights(source: TensorSource) -> int:
    """The number of all values."""
    return sum(prod(shape) for shape in source.shapes().values())


def artefact_of(
    parts: ModelFolders,
    source: TensorSource,
    small: Mapping[str, bytes],
    dtype: DtypeName | None,
    reward_head: RewardHead,
) -> Artefact:
    """What the receipt says of a Hugging Face folder. Whatever has other bits than the checkpoint
    was rounded: a merged adapter, another dtype, dequantized weights."""
    stored = read_config(parts.model / "config.json")
    is_rounded = parts.adapter is not None or dtype is not None or "quantization_config" in stored
    to = "huggingface" if head_of(parts, reward_head) is None else "reward"
    written = str(json.loads(small["config.json"]).get("dtype"))
    return Artefact(to, written, num_weights(source), is_rounded)


def whole_model(
    parts: ModelFolders,
    *,
    dtype: DtypeName | None = None,
    trust_remote_code: bool = False,
    reward_head: RewardHead = "score",
    keeps_unloaded: bool = False,
) -> tuple[TensorSource, dict[str, bytes]]:
    """The weights of a model, with an adapter merged into them, and their companion files.
    ``keeps_unloaded``: with what its base has, and transformers does not load."""
    whole = merged_weights(parts, trust_remote_code, is_cast=dtype is not None)
    files: Mapping[str, bytes] = {}
    if (head := head_of(parts, reward_head)) is not None and reward_head == "v_head":
        files = v_head_file(head)
    elif head is not None:
        whole = _scored(parts, whole, head, trust_remote_code)
    if keeps_unloaded and head is None and (more := unloaded_weights(parts)) is not None:
        whole = replace(whole, source=JoinedSource([("", whole.source), ("", more)]))
    source = cast(whole.source, dtype, kept_in_float32(parts.model, dtype))
    stored = read_config(parts.model / "config.json")
    old = {**old_rope(stored.get(ROPE), str(stored.get("model_type"))), **old_layers(stored)}
    small = {
        **companions_of(parts.model, parts.tokenizer),
        **configs(parts.model, source, {**old, **whole.changes}, whole.stop_token_ids),
        **files,
    }
    return source, small


def unloaded_weights(parts: ModelFolders) -> TensorSource | None:
    """The tensors of the base of a full model that transformers does not load, so that no
    checkpoint has them: layers for multi-token prediction, for example. None if there are none."""
    if parts.base is None or parts.adapter is not None:
        return None
    path = parts.base.path
    has_more = num_added_layers(read_config(parts.model / CONFIG)) > 0
    if not files.is_folder(Path(path)) and not has_more:
        return None  # of a hub, whose download nothing asks for
    try:
        base = find_parts(path, reading=parts.base.reading)
    except (ModelError, CheckpointError) as error:
        if has_more:
            logger.warning(
                "config.json names layers for multi-token prediction, which are in the base alone, "
                "and it is not here (%s): serve the export without them",
                error,
            )
        return None
    stored = open_folder(base.model, base.reading)
    model = meta_model(parts.model, parts.base.trust_remote_code, parts.reading)
    own = unloaded(model, stored.shapes())
    sources: list[TensorSource] = []
    sources += [Renamed(stored, {name: name for name in own})] if own else []
    sources += [more] if (more := unloaded_weights(base)) is not None else []
    return JoinedSource([("", source) for source in sources]) if sources else None


def _scored(
    parts: ModelFolders, whole: MergedModel, head: TensorSource, trust_remote_code: bool
) -> MergedModel:
    """A reward model or classifier as sequence classification, which pads with a token that ends
    nothing."""
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=trust_remote_code)
    stops = stop_token_ids(tokenizer)
    pad = tokenizer.pad_token_id
    # transformers scores the last token that is not padding: one too early where the end token
    # pads. Without a padding token it refuses batches, which is better than another reward
    # (docs/decisions/0049).
    if pad is None or pad in stops:
        logger.warning(
            "%s: its tokenizer pads with %s, which transformers could not tell from the end token "
            "of a text, so config.json names no pad token: transformers scores one text at a time",
            parts.tokenizer,
            "nothing" if pad is None else repr(tokenizer.pad_token),
        )
        pad = None
    model = meta_model(parts.model, trust_remote_code, parts.reading)
    source, changes = as_sequence_classification(whole.source, head, model, parts.classes)
    changes = {**whole.changes, **changes, "pad_token_id": pad}
    return MergedModel(source, changes, whole.stop_token_ids)


@dataclass(frozen=True)
class MergedModel:
    """The weights to write, and the resulting changes of ``config.json``."""

    source: TensorSource
    changes: Mapping[str, object]
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Names:
    """The embedding tensors of a model; ``head`` is stored unless it is tied to ``embed``."""

    embed: str
    head: str | None


def merged_weights(
    parts: ModelFolders, trust_remote_code: bool, *, is_cast: bool = False
) -> MergedModel:
    """The weights of ``parts`` as one model; ``is_cast``: an adapter is merged in float32 at least,
    and the result is rounded by a cast. Raises ``CheckpointError`` if they do not merge."""
    path, reading = str(parts.model), parts.reading
    section = ModelSection(path=path, reading=reading, trust_remote_code=trust_remote_code)
    base, dequantized = base_weights(parts.model, section)
    if parts.adapter is None:
        if parts.recipe is None:
            return MergedModel(base, dequantized)
        # Of plain text, a run has saved its own end alone, and the template has another.
        tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=trust_remote_code)
        return MergedModel(base, dequantized, stop_token_ids(tokenizer))
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=trust_remote_code)
    model = meta_model(parts.model, trust_remote_code, parts.reading)
    names = _names(model)
    old = base.shapes().get(names.embed, (0,))[0]
    if is_cast and torch.float64 not in base.dtypes().values():
        base = cast(base, "float32", none_kept)
    grown = _grow(base, names, len(tokenizer))
    updated = updated_tensors(model, parts.adapter)
    source, is_untied = _merge(grown, parts.adapter, names, updated)
    rows = source.shapes().get(names.embed, (0,))[0]
    section = replace(section, **extension_of(parts.adapter))
    changes = {**dequantized, **changed_config(parts.model, section)}
    changes |= {"vocab_size": rows} if rows != old else {}
    if is_untied:
        changes["tie_word_embeddings"] = False
    return MergedModel(source, changes, stop_token_ids(tokenizer))


def _names(model: PreTrainedModel) -> _Names:
    """The names of the embeddings."""
    modules = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    embed = modules[id(model.get_input_embeddings())]
    return _Names(f"{embed}.weight", None if head is None else f"{modules[id(head)]}.weight")


def _grow(base: TensorSource, names: _Names, rows: int) -> TensorSource:
    """``base`` with an embedding for every token of the tokenizer, initialized as in training."""
    stored = base.shapes()
    present = [name for name in (names.embed, names.head or "") if name in stored]
    if not present or stored[present[0]][0] >= rows:
        return base
    return Grown(base, frozenset(present), rows)


def _merge(
    base: TensorSource, adapter: Path, names: _Names, updated: Mapping[str, Updated]
) -> tuple[TensorSource, bool]:
    """The merge, and whether it untied the embeddings. PEFT may train only one of two tied
    embeddings, or each for itself; then both are stored. If they are equal
    (``ensure_weight_tying``), they stay tied."""
    kind, stored = _as_lora(adapter), base.shapes()
    is_tied = names.head is not None and names.head not in stored and names.embed in stored
    touched = _touched(adapter, names) if is_tied else set()
    if not touched or names.head is None:
        return merged(base, adapter, updated, kind), False
    if any(key.endswith(TOKENS) for key in open_folder(adapter).shapes()):
        raise CheckpointError(
            f"{adapter}: trains rows of tied embeddings, and {min(touched)} in another way; merge "
            "it with peft's own merge_and_unload()"
        )
    everything = {name: name for name in stored}
    both = merged(Renamed(base, {**everything, names.head: names.embed}), adapter, updated, kind)
    if len(touched) > 1 and same_values(both, names.embed, names.head):
        return Renamed(both, everything), False
    return both, True


def _as_lora(adapter: Path) -> AsLoRA | None:
    """How the kind of an adapter merges; None, if no method trains it."""
    kind = config_value(adapter, "peft_type")
    methods = (method for method in METHODS.values() if issubclass(method, AdapterMethod))
    return next((method.as_lora for method in methods if method.peft_type == kind), None)


def _touched(adapter: Path, names: _Names) -> set[str]:
    """The embeddings that the adapter changes."""
    stored = [key.removeprefix(PREFIX) for key in open_folder(adapter).shapes()]
    keys = [key for key in stored if not key.endswith(TOKENS)]  # PEFT keeps these tied
    pair = [name for name in (names.embed, names.head) if name is not None]
    return {name for name in pair if any(k.startswith(name.removesuffix("weight")) for k in keys)}


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Those that end a response by the tokenizer's own chat template; none without one."""
    if not saved_source(tokenizer):
        return ()
    template = load_template("auto", tokenizer)
    return Codec(tokenizer, template, without_datasets()).stop_token_ids


def updated_tensors(model: PreTrainedModel, adapter: Path) -> dict[str, Updated]:
    """The tensors that each module of the adapter in the folder ``adapter`` changes, by the names
    in the adapter's file, and the parameters that have another name in the base; ``model``, on the
    meta device, is changed. Raises ``CheckpointError`` if it is of another model, or its experts
    are not slices of the parameters in memory."""
    names = names_in_files(model, FullWeights(model).state_dict())
    fused = {name: len(p) for name, p in model.named_parameters() if p.ndim == 3}  # experts
    try:
        slices = {} if not fused else places(model)
        names |= names_unless_split(model, fused)
        with torch.device("meta"):
            wrapped = attach_empty(model, adapter)
    except (ModelError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{adapter}: cannot be merged into its base: {error}") from None
    module_names = {id(m): name.removeprefix(PREFIX) for name, m in wrapped.named_modules()}
    renamed = {here: name for here, name in names.items() if here != name and here not in fused}
    updated = {here: Updated({name: None}) for here, name in renamed.items()}
    for parameter, layer in adapted(wrapped).items():
        if parameter not in fused:  # a tied one has no name of its own
            updated[module_names[id(layer)]] = Updated({names.get(parameter, parameter): None})
            continue
        parts = {n: at.start for n, at in slices.items() if at.fused == parameter}
        parts = parts or {names[parameter]: (0, 0, 0)}
        at = {name: ExpertSlice(fused[parameter], start) for name, start in parts.items()}
        updated[module_names[id(layer)]] = _of_layer(layer, at)
    return updated


def _of_layer(layer: Any, at: dict[str, ExpertSlice]) -> Updated:
    """As PEFT's layer says that it merges."""
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    return Updated(dict(at), layer.scaling["default"], is_transposed)


BLOCK = 4 << 20  # elements read at a time


@dataclass(frozen=True)
class Grown:
    """``source`` with ``rows`` rows in some matrices; the new ones are the mean of the old."""

    source: TensorSource
    names: frozenset[str]
    rows: int
    _means: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def shapes(self) -> Mapping[str, Shape]:
        """More rows in the resized ones."""
        return {
            name: (self.rows, *shape[1:]) if name in self.names else shape
            for name, shape in self.source.shapes().items()
        }

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Unchanged."""
        return self.source.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Old rows unchanged, new rows all alike."""
        if name not in self.names:
            return self.source.read(name, box)
        columns = self.source.shapes()[name][1]
        old = self.source.shapes()[name][0]
        parts = []
        if common := box & Box((0, 0), (old, columns)):
            parts.append(self.source.read(name, common))
        if new := box & Box((old, 0), (self.rows - old, columns)):
            mean = self._mean(name)[new.start[1] : new.stop[1]]
            parts.append(rounded(mean, self.dtypes()[name], name).expand(new.shape))
        return torch.cat(parts)

    def _mean(self, name: str) -> torch.Tensor:
        if name not in self._means:
            shape = self.source.shapes()[name]
            # In float64: in float32 the mean of 100,000 rows would depend on where blocks end.
            total = torch.zeros(shape[1], dtype=torch.float64)
            for box in Box.whole(shape).blocks(max(BLOCK, shape[1])):
                total += self.source.read(name, box).double().sum(0)
            self._means[name] = (total / shape[0]).float()
        return self._means[name]


def base_weights(folder: Path, section: ModelSection) -> tuple[TensorSource, Mapping[str, object]]:
    """The weights in ``folder``, and the changes of its ``config.json`` that they need. Raises
    ``ModelError`` if they are not those of the model that ``config.json`` describes."""
    source, changes = _stored_weights(folder, section)
    try:
        is_scored = is_sequence_classification(folder)  # its head has another name
        # Weights under other names, or of another shape, were once written as a model that nothing
        # opens, and with --no-verify nobody was told.
        named = open_named(folder, reading=section.reading) if is_scored else source
        meta_twin(folder, section, named)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelError(f"{folder}: cannot read the model: {first_line(error)}") from None
    return source, changes


def _stored_weights(
    folder: Path, section: ModelSection
) -> tuple[TensorSource, Mapping[str, object]]:
    stored = read_config(folder / CONFIG).get("quantization_config")
    if not isinstance(stored, dict) or not is_dequantized_here(stored.get("quant_method")):
        opener = open_named if has_opener(folder) else open_folder
        return opener(folder, reading=section.reading), {}
    return open_base(folder, section), {"quantization_config": None}


def meta_model(
    folder: Path, trust_remote_code: bool, reading: Reading = AS_STORED
) -> PreTrainedModel:
    """The model in ``folder`` without its values. It knows the names in its files: some models have
    two families of them, and transformers writes back the one that it has read."""
    path = str(folder)
    section = ModelSection(path=path, reading=reading, trust_remote_code=trust_remote_code)
    try:
        if detect_layout(folder) is not None:
            twin = meta_twin(folder, section, open_base(folder, section))
            if twin is not None:
                return twin
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(
                config, trust_remote_code=trust_remote_code
            )
    except NO_MODEL_AT_ALL as error:
        reason = why_no_model(error, folder)
        raise ModelError(f"{folder}: cannot read the model: {reason}") from None
    return model
