"""Load a sharded model: build it on the meta device, shard it, then load only this rank's slices
from the safetensors files.

No rank ever has the full model: each reads, of every tensor that is still in its model after
sharding, its own box. What a method adds (adapters) has the values that it would have on one rank.

In the order of a start: ``init_on_meta`` makes a ``MetaModel``, ``MetaModel.apply`` adds the method
and returns a ``ShardLoader``, ``draft`` shards the model, and ``ShardLoader.fill`` reads this
rank's boxes. A ``Reader`` hides where the values of a tensor come from.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.layouts.adapter_merge import same_values
from ..checkpoint.layouts.opening import open_named
from ..checkpoint.sources import ComputedSource, TensorSource, read_whole
from ..checkpoint.state.states import BLOCK, local_box_of
from ..errors import CheckpointError, ModelError
from ..log import fell_back
from ..model.config import as_dequantized, auto_class, form_of, read_config
from ..model.loading import (
    CapturedInit,
    device,
    fill_buffers,
    kept_tensors,
    load_model,
    materialize,
    names_stored,
    new_rows,
    why_not_empty,
)
from ..model.lora_layers import has_exact_lengths, lengths
from ..model.section import ModelSection
from ..model.weights import place
from ..parallel.sharding import Box, Cuts
from ..parallel.world import World

logger = logging.getLogger(__name__)
Reader = Callable[[Box], torch.Tensor]  # the values of one box of one tensor
_READERS = 4  # threads
# Parts of names, as PEFT writes them.
_COPY, _ORIGINAL = ".modules_to_save.default.", ".original_module."
_TOKENS = ".trainable_tokens_delta.default"
_MAGNITUDE, _BASE = ".lora_magnitude_vector.default.", ".base_layer."


def init_on_meta(
    base: Path,
    section: ModelSection,
    *,
    dtype: torch.dtype | Literal["auto"],
    weights: Path | None = None,
) -> MetaModel | None:
    """The meta model in ``base``, with weights of the folder ``weights`` if that is given; None,
    with a log line, if it can only be loaded in full. Raises ``ModelError`` as ``load_model``
    does."""

    def only_in_full(why: str) -> MetaModel | None:
        what = f"{base}: every rank loads the full model before sharding"
        fell_back(what, why, "takes the memory of all of it on each", logging.INFO)
        return None

    try:
        if why := why_not_empty(base, section):
            return only_in_full(why)
        # ``checked_files`` checks the values, of which each rank reads its boxes only
        source = open_base(base, section, weights, is_checked=True)
    except (CheckpointError, ValueError, OSError) as error:  # loading it whole will say more
        return only_in_full(str(error))
    # transformers itself renames, ties, and reports what is missing: a table of names of our own
    # would be wrong with its next version (decisions/0026)
    file_tensors = _meta_tensors(source)
    model = load_model(base, section, dtype=dtype, weights=file_tensors)
    unknown_buffer = fill_buffers(model)
    _tie_equal_weights(model, source)
    file_names = names_stored(model, file_tensors)
    tensors = dict(kept_tensors(model))
    if fused := [name for name in tensors if name not in file_names]:
        return only_in_full(f"{fused[0]} has no tensor of its own in the files")
    if unknown_buffer is not None:
        return only_in_full(f"nothing initializes its buffer {unknown_buffer}, which is in no file")
    stored = {tensor: file_names[name] for name, tensor in tensors.items()}
    aliases = model.named_parameters(remove_duplicate=False)
    return MetaModel(model, source, stored, file_names | {name: stored[p] for name, p in aliases})


def _meta_tensors(source: TensorSource) -> dict[str, torch.Tensor]:
    dtypes = source.dtypes()
    return {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in source.shapes().items()
    }


def _tie_equal_weights(model: PreTrainedModel, source: TensorSource) -> None:
    """Tie weights that are separate in the files, if they are equal."""
    file_names = names_stored(model, _meta_tensors(source))
    for target_name, source_name in list(model.all_tied_weights_keys.items()):
        if target_name not in file_names or source_name not in file_names:
            continue  # one object already
        # The configuration alone says that they are tied: one of two matrices would be lost in
        # silence.
        if not same_values(source, file_names[target_name], file_names[source_name]):
            logger.warning("%s and %s are not tied: their values differ", target_name, source_name)
            model.all_tied_weights_keys.pop(target_name)
    # Computed again, the mapping would have the pairs that were just removed.
    model.tie_weights(recompute_mapping=False)


@dataclass(frozen=True)
class MetaModel:
    """A meta model, and the files of its weights."""

    model: PreTrainedModel  # on the meta device; may be pruned or grown before a method is applied
    source: TensorSource
    stored: Mapping[torch.Tensor, str]  # each tensor of the model: its name in the files
    names: Mapping[str, str]  # the same by its names in the model

    def apply(
        self, method: Callable[[PreTrainedModel], nn.Module]
    ) -> tuple[nn.Module, ShardLoader]:
        """The model with ``method`` applied, and the loaders of its values."""
        base_readers: dict[torch.Tensor, Reader] = {}
        matrices = {id(weight) for weight in _vocabulary_matrices(self.model)}
        for name, tensor in kept_tensors(self.model):
            # by its name: what has been put in the place of a tensor since, grown or copied
            if file_name := self.stored.get(tensor) or self.names.get(name):
                is_resized = tuple(tensor.shape) != self.source.shapes()[file_name]
                is_grown = id(tensor) in matrices or is_resized
                rows = new_rows(self.model) if is_grown else range(0)
                base_readers[tensor] = self._reader(file_name, tensor, rows)
        by_place = {place(tensor): reader for tensor, reader in base_readers.items()}
        # PEFT draws on the CPU, in its order. Drawn from a seed for each name, a mesh would start
        # elsewhere than one process (decisions/0026).
        with CapturedInit() as captured:
            policy = method(self.model)
        _restore_constants(policy, captured)
        tensors, readers = dict(kept_tensors(policy)), dict[str, Reader]()
        for name, tensor in tensors.items():
            if tensor in base_readers:
                readers[name] = base_readers[tensor]
            elif (values := captured.of(tensor)) is not None:
                readers[name] = partial(piece, values)
            elif (copied := captured.source_of(tensor)) is not None and place(copied) in by_place:
                readers[name] = by_place[place(copied)]
        for name, tensor in tensors.items():
            if name not in readers:  # after all others, from which these are derived
                readers[name] = _derived_reader(name, tensor, policy, readers)
        return policy, ShardLoader(readers, tensors)

    def _reader(self, file_name: str, tensor: torch.Tensor, rows: range) -> Reader:
        """Read ``file_name`` as transformers would: in the dtype of ``tensor``, with new rows."""
        if not rows:
            return partial(_read_as, self.source, file_name, tensor.dtype)
        return _GrownEmbedding(self.source, file_name, tuple(tensor.shape), tensor.dtype, rows)


def _vocabulary_matrices(model: PreTrainedModel) -> list[torch.Tensor]:
    """The matrices with a row for each token; a stage of a pipeline may have neither."""
    weights = list[torch.Tensor]()
    for find in (model.get_input_embeddings, model.get_output_embeddings):
        with contextlib.suppress(NotImplementedError, AttributeError):
            weights.append(find().weight)
    return weights


def _restore_constants(policy: nn.Module, captured: CapturedInit) -> None:
    """Put back the values of buffers that the method adds and that are in no file: indices."""
    for prefix, module in policy.named_modules():
        for name in module._non_persistent_buffers_set if prefix else ():
            buffer = module._buffers[name]
            if buffer is not None and (values := captured.of(buffer)) is not None:
                module._buffers[name] = values


@dataclass(frozen=True)
class ShardLoader:
    """The loaders of a model's tensors, by their names."""

    readers: Mapping[str, Reader]
    tensors: Mapping[str, torch.Tensor]  # by the same names, before they were sharded

    def of(self, model: nn.Module) -> ShardLoader:
        """Those of the tensors that ``model`` still has, perhaps under another name (tied ones)."""
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        old_names = {new: names[id(t)] for new, t in kept_tensors(model) if id(t) in names}
        readers = {new: self.readers[old] for new, old in old_names.items() if old in self.readers}
        return ShardLoader(readers, {new: self.tensors[old] for new, old in old_names.items()})

    def fill(self, model: nn.Module, cuts: Mapping[str, Cuts], world: World) -> None:
        """Materialize ``model`` on this rank's device, and load its shards. Raises ``ModelError``
        on every rank if one cannot read."""
        materialize(model, device())
        tensors = dict(kept_tensors(model))

        def fill_box(name: str) -> None:
            local_box_of(name, tensors[name].detach(), cuts.get(name)).fill(self.readers[name])

        problem = None
        try:
            with ThreadPoolExecutor(_READERS) as pool:
                # As a list: only who asks for a result gets the error of its thread.
                list(pool.map(fill_box, self.readers))
        except (CheckpointError, ModelError) as error:
            problem = str(error)
        # One rank that raised alone would leave the others waiting in their next collective until
        # it times out.
        if problem := world.first_of(problem):
            raise ModelError(problem)


def _read_as(source: TensorSource, name: str, dtype: torch.dtype, box: Box) -> torch.Tensor:
    return source.read(name, box).to(dtype)


@dataclass(frozen=True)
class _GrownEmbedding:
    """A matrix with new rows, which are the mean of those before (see ``grow_embeddings``)."""

    source: TensorSource
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: range

    def __call__(self, box: Box) -> torch.Tensor:
        values = torch.empty(box.shape, dtype=self.dtype)
        stored = box & Box.whole(self.source.shapes()[self.name])
        if stored is not None:
            values[stored.slices_in(box)] = self.source.read(self.name, stored).to(self.dtype)
        first, stop = (
            min(max(row - box.start[0], 0), box.shape[0])
            for row in (self.rows.start, self.rows.stop)
        )
        if first < stop:
            columns = tuple(slice(*ends) for ends in zip(box.start[1:], box.stop[1:], strict=True))
            values[first:stop] = self._mean[columns]
        return values

    @cached_property
    def _mean(self) -> torch.Tensor:
        # of the full matrix on every rank, so that its sums have one order and the bits are equal
        known = read_whole(self.source, self.name)[: self.rows.start]
        return known.to(self.dtype).float().mean(0).to(self.dtype)


def piece(values: torch.Tensor, box: Box) -> torch.Tensor:
    """A reader of a tensor that is in memory."""
    return values[box.slices_in(Box.whole(tuple(values.shape)))]


def _derived_reader(
    name: str, tensor: torch.Tensor, policy: nn.Module, readers: Mapping[str, Reader]
) -> Reader:
    """The values that PEFT would derive from those of other tensors: a copy, some rows, or the
    lengths of rows (of a matrix that its update, zero at first, has not changed)."""
    if (original := name.replace(_COPY, _ORIGINAL)) in readers:
        return readers[original]
    adapter = name.removesuffix(_TOKENS)
    if adapter != name and (embedding := f"{adapter}.base_layer.weight") in readers:
        ids: Any = policy.get_submodule(adapter).token_indices
        return partial(_rows, readers[embedding], ids["default"])
    base = name.replace(_MAGNITUDE, _BASE)
    if base in readers and tensor.dim() == 1:
        module: Any = policy.get_submodule(name.rpartition(".")[0])
        weight = policy.get_parameter(base)
        if module.fan_in_fan_out:
            is_exact = has_exact_lengths(module)
            return partial(
                _column_lengths,
                readers[base],
                tuple(weight.shape),
                None if is_exact else weight.dtype,
            )
        return partial(_row_lengths, readers[base], weight.shape[1])
    raise ModelError(f"{name}: no initial values are known")


def _rows(read: Reader, ids: Sequence[int], box: Box) -> torch.Tensor:
    """The rows ``ids`` of a matrix."""
    rows = torch.empty(box.shape)  # a rank may have no row
    for index, row in enumerate(ids[box.start[0] : box.stop[0]]):
        rows[index] = read(Box((row, *box.start[1:]), (1, *box.shape[1:])))[0]
    return rows


def _row_lengths(read: Reader, columns: int, box: Box) -> torch.Tensor:
    rows = Box((*box.start, 0), (*box.shape, columns))
    blocks = rows.blocks(max(BLOCK, columns))  # of complete rows
    return torch.cat([lengths(read(block)) for block in blocks])


def _column_lengths(
    read: Reader, shape: tuple[int, ...], dtype: torch.dtype | None, box: Box
) -> torch.Tensor:
    """The same of a weight that is stored transposed, as those of GPT-2 and of embeddings; rounded
    to ``dtype``, as PEFT does those of embeddings."""
    columns = Box((0, *box.start), (shape[0], *box.shape))
    norms = lengths(read(columns).T)
    return norms if dtype is None else norms.to(dtype)


def open_base(
    base: Path, section: ModelSection, weights: Path | None = None, *, is_checked: bool = False
) -> TensorSource:
    """The tensors of the model in ``base``, with the values in ``weights`` if that is given; those
    that are stored in one of the ``FORMS`` of quantized weights dequantized. ``is_checked`` as in
    ``FolderSource``. Raises ``ModelError`` if a part of a quantized weight is wrong."""
    source = open_named(weights or base, base, section.reading, is_checked=is_checked)
    form = form_of(read_config(base, section), base)
    if form is None:
        return source
    dtypes = source.dtypes()
    kinds = {name: (shape, dtypes[name]) for name, shape in source.shapes().items()}
    try:
        quantized = form.weights(kinds, partial(read_whole, source))
    except ModelError as error:
        raise ModelError(f"{weights or base}: {error}") from None
    # Some writers add biases, all zeros, to layers of models that have none.
    biases = {name: f"{name.removesuffix('weight')}bias" for name in quantized}
    added = {name: bias for name, bias in biases.items() if bias in source.shapes()}
    if added:
        with torch.device("meta"):
            config = as_dequantized(read_config(base, section))
            model = auto_class(config).from_config(config)
        parameter_names = {name for name, _ in model.named_parameters()}
        quantized |= {
            name: replace(quantized[name], unused=(*quantized[name].unused, bias))
            for name, bias in added.items()
            if bias not in parameter_names and not read_whole(source, bias).any()
        }
    return ComputedSource(source, quantized)


def read_base(base: Path, section: ModelSection, weights: Path | None) -> dict[str, torch.Tensor]:
    """All tensors of ``open_base``, in memory. Raises ``ModelError`` for a model with code of its
    own, which could not be given them."""
    if why := why_not_empty(base, section):
        raise ModelError(f"{base}: {why}, so its quantized weights are not read")
    source = open_base(base, section, weights)
    try:
        return {name: read_whole(source, name) for name in source.shapes()}
    except ModelError as error:
        raise ModelError(f"{weights or base}: {error}") from None


def meta_twin(base: Path, section: ModelSection, source: TensorSource) -> PreTrainedModel | None:
    """The model that the configuration in ``base`` describes, on the meta device, which knows by
    what names ``source`` has its tensors; None if it can only be loaded in full. Raises
    ``ModelError`` unless they are its tensors, by name and shape."""
    if why_not_empty(base, section) is not None:
        return None
    return load_model(base, section, dtype="auto", weights=_meta_tensors(source))
