"""Calibrate quantized weights by GPTQ, on rows of the run's training data.

``Calibrator.run`` is the way through. One decoder layer is in memory at a time. It gets the hidden
states that the layers before it, already quantized, compute, and its weights are chosen so that its
outputs on them change least. What its linear maps get as inputs is seen as they are called. So an
expert is calibrated on the tokens that the router sends to it, whatever the architecture.

GPTQ (arXiv:2210.17323) rounds a weight column by column, and corrects the columns that follow for
what each has lost. With inputs X [N, I] and H = X'X, what is minimized is tr((W - Q) H (W - Q)').

Legend of shapes: N tokens, O outputs, I inputs, G groups of inputs that share a scale, T tokens of
a row, D hidden size.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...batch import Features
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources import (
    JoinedSource,
    Renamed,
    TensorsInMemory,
    TensorSource,
    copy,
    read_whole,
)
from ...data.text.codec import Codec
from ...data.text.collation import with_chosen
from ...data.training_data import open_stream, prepare
from ...errors import ModelError, first_line
from ...model.config import auto_class
from ...model.loading import device, fill_buffers
from ...model.lora_targets import layer_list
from ...model.weights import FullWeights, FusedPlacement, names_in_files, place, places
from ...recipe.recipe import Recipe
from ...recipe.recipe_data import encoding_of
from ...use.evaluation import own_codec
from ...use.model_loading import ModelFolders, codec_of
from .schemes import LinearLayers, QuantizedSource, WeightScheme

logger = logging.getLogger(__name__)
_BLOCK = 128  # columns whose corrections are applied to the others at once
DAMPING = 0.01  # of the mean of H's diagonal, which is added to it
LONGEST = 2048  # tokens of a row
FEWEST = 128  # tokens of an expert; of fewer, GPTQ would learn only these
FEWEST_IN_ALL = FEWEST  # of all rows
_OF_MODELS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)  # that do not fit
Place = tuple[int, int, int]  # of a matrix in memory; see ``place``
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer gets besides the hidden states


@dataclass(frozen=True)
class Calibrator:
    """Chooses the quantized weights of a model by GPTQ."""

    model: LayerwiseModel
    layers: LinearLayers
    scheme: WeightScheme
    rounded: list[str] = field(default_factory=list)
    """Weights that got too few tokens, and are rounded to nearest."""

    @torch.no_grad()
    def run(self, rows: Sequence[Sequence[int]], scratch: Path) -> TensorSource:
        """The tensors of the quantized model: those of decoder layers chosen on ``rows``, and
        stored in the new folder ``scratch``; the others as ``QuantizedSource`` has them."""
        hidden, calls = self.model.record(rows)
        _refuse_infinite(hidden, "the embeddings")
        sources, dtypes, num_weights = list[TensorSource](), self.model.source.dtypes(), 0
        for index, layer_calls in enumerate(calls):
            with self.model.loaded(index) as (prefix, module):
                matrices = matrices_of(module, prefix, self.layers, dtypes)
                num_weights += len(matrices)
                for matrix in matrices:
                    _stored(matrix)  # is finite, before its outputs are not
                statistics = statistics_of(module, matrices, hidden, layer_calls)
                _refuse_infinite([each.gram for each in statistics.values()], prefix)
                tensors: dict[str, torch.Tensor] = {}
                for matrix in matrices:
                    tensors |= self._quantized(matrix, statistics.get(matrix.place))
                for row, call in enumerate(layer_calls):
                    # With the weights of the file: these outputs are what the next layer will get.
                    hidden[row] = run(module, hidden[row], call)
            _refuse_infinite(hidden, prefix)
            # On the disk before the next layer is read: 12 layers take 31 MB more than 3 of them
            # (benchmarks/RESULTS.md, "Quantized weights").
            copy(TensorsInMemory(tensors), scratch / str(index))
            sources.append(open_folder(scratch / str(index)))
            # Masks and rotations of all rows; this layer is not called again.
            layer_calls.clear()
            logger.info("calibrated layer %d of %d", index + 1, len(calls))
        if self.rounded:
            logger.warning(
                "%d of %d weights got too few tokens of the calibration rows (an expert needs %d), "
                "and are rounded to nearest (%s, for example)",
                *(len(self.rounded), num_weights, FEWEST, self.rounded[0]),
            )
        done = {name for source in sources for name in source.shapes()}
        plain = QuantizedSource(self.model.source, self.scheme, self.layers.names)
        left = Renamed(plain, {name: name for name in plain.shapes() if name not in done})
        return JoinedSource([("", left), *(("", source) for source in sources)])

    def _quantized(
        self, matrix: QuantizedMatrix, inputs: InputStatistics | None
    ) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, which becomes what they stand for."""
        stored = _stored(matrix)
        # A router may send an expert next to nothing, which GPTQ would learn by heart
        # (decisions/0071).
        if inputs is None or (matrix.is_expert and inputs.num_tokens < FEWEST):
            self.rounded.append(matrix.name)
            values = round_to_nearest(stored.float(), self.scheme, stored.dtype)
        else:
            values = round_by_gptq(stored, inputs.gram, self.scheme)
        scales, zeros = self.scheme.scales(stored)
        matrix.weight.copy_(values)
        packed = self.scheme.packed(values.cpu(), scales.cpu(), zeros.cpu())
        return {f"{matrix.name.removesuffix('weight')}{role}": t for role, t in packed.items()}


def _stored(matrix: QuantizedMatrix) -> torch.Tensor:
    """The weight in the type of the files."""
    stored = matrix.weight.to(matrix.dtype)
    if not stored.isfinite().all():
        raise ModelError(f"{matrix.name}: it contains NaN or infinite values; nothing was written")
    return stored


def _refuse_infinite(values: Sequence[torch.Tensor], where: str) -> None:
    """Raise ``ModelError`` for what no weight can be calibrated on."""
    if not all(tensor.isfinite().all() for tensor in values):
        raise ModelError(
            f"{where}: what it computes of the training data contains NaN or infinite values; "
            "nothing was written"
        )


def round_to_nearest(
    weight_OI: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> torch.Tensor:
    """The values that ``weight_OI`` has in the file, if scales are stored in ``dtype``."""
    high = 2 ** (scheme.args.num_bits - 1) - 1
    scales_OG = scheme.scales(weight_OI.to(dtype))[0].float()
    scales_OI = scales_OG.repeat_interleave(weight_OI.shape[1] // scales_OG.shape[1], 1)
    return (weight_OI / scales_OI).round().clamp(-high - 1, high) * scales_OI


def round_by_gptq(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """The values [O, I] float32 that take the place of ``weight_OI``, each a multiple of its scale.

    The scales are those of the unchanged weight. Columns are rounded in the order of their inputs'
    energy, greatest first; the layout of the files does not depend on that order.
    """
    low, high = -(2 ** (scheme.args.num_bits - 1)), 2 ** (scheme.args.num_bits - 1) - 1
    scales_OG = scheme.scales(weight_OI)[0].float()
    per_group = weight_OI.shape[1] // scales_OG.shape[1]
    scales_OI = scales_OG.repeat_interleave(per_group, 1)
    # The scales stay with their columns, so the files need no ``g_idx``, which tells the groups of
    # columns apart where they were put into another order.
    order_I = hessian_II.diagonal().argsort(descending=True)
    remaining_OI = weight_OI.float()[:, order_I]
    scales_OI = scales_OI[:, order_I]
    root_II = _root(hessian_II.float()[order_I][:, order_I])
    rounded_OI = torch.empty_like(remaining_OI)
    for start in range(0, remaining_OI.shape[1], _BLOCK):
        stop = min(start + _BLOCK, remaining_OI.shape[1])
        lost = torch.empty_like(remaining_OI[:, start:stop])
        for i in range(start, stop):
            scale_O = scales_OI[:, i]
            rounded_OI[:, i] = (remaining_OI[:, i] / scale_O).round_().clamp_(low, high) * scale_O
            lost[:, i - start] = (remaining_OI[:, i] - rounded_OI[:, i]) / root_II[i, i]
            remaining_OI[:, i:stop] -= torch.outer(lost[:, i - start], root_II[i, i:stop])
        remaining_OI[:, stop:] -= lost @ root_II[start:stop, stop:]
    back_I = order_I.argsort()
    return rounded_OI[:, back_I].contiguous()


def _root(hessian_II: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse. Inputs that were always 0 decide nothing; damping
    is raised until the factor exists."""
    diagonal = hessian_II.diagonal()
    # Else one input that is always 0 would leave the matrix without an inverse.
    diagonal[diagonal == 0] = 1
    damping = DAMPING * diagonal.mean()
    # At the tenth, damping is 10^7 times the mean of the diagonal.
    for _ in range(10):
        damped = hessian_II + damping * torch.eye(len(hessian_II), device=hessian_II.device)
        # It says by a number that there is no factor, where cholesky raises.
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            root: torch.Tensor
            root, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and root.isfinite().all():
                return root
        damping *= 10
    raise AssertionError("a matrix that is nearly diagonal has a factor")


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight that is quantized."""

    name: str  # in the files
    weight: torch.Tensor  # [O, I] in the layer's memory
    dtype: torch.dtype  # in the files
    place: Place  # of the matrix that the layer multiplies with, of which it may be some rows
    is_expert: bool = False


@dataclass
class InputStatistics:
    """Of all inputs of a matrix."""

    gram: torch.Tensor  # [I, I], X'X
    num_tokens: int


class LinearCalls(TorchFunctionMode):
    """Calls ``seen`` with inputs and weight of every linear map, while the block lasts."""

    def __init__(self, seen: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as without it."""
        named = kwargs or {}
        if func is F.linear:
            inputs, weight = (*args, *(named[n] for n in ("input", "weight") if n in named))[:2]
            self.seen(inputs, weight)
        return func(*args, **named)


def matrices_of(
    layer: nn.Module, prefix: str, layers: LinearLayers, dtypes: Mapping[str, torch.dtype]
) -> list[QuantizedMatrix]:
    """The weights of a loaded ``layer``, whose name is ``prefix``, that are quantized. ``dtypes``
    are those in the files."""
    matrices = []
    for inside, module in layer.named_modules():
        if (full := f"{prefix}.{inside}") in layers.weights:
            name, weight = layers.weights[full], module.get_parameter("weight").detach()
            matrices.append(QuantizedMatrix(name, weight, dtypes[name], place(weight)))
    parameters = dict(layer.named_parameters(prefix=prefix))
    for name, at in layers.experts.items():
        if at.fused in parameters:
            expert, row, _ = at.start
            whole = parameters[at.fused].detach()[expert]
            part = whole[row : row + at.shape[0]]
            matrices.append(QuantizedMatrix(name, part, dtypes[name], place(whole), is_expert=True))
    return matrices


def statistics_of(
    layer: nn.Module,
    matrices: Sequence[QuantizedMatrix],
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
) -> Mapping[Place, InputStatistics]:
    """Of the inputs of all ``matrices`` of ``layer`` that get any."""
    places = {matrix.place for matrix in matrices}
    statistics: dict[Place, InputStatistics] = {}
    last: tuple[torch.Tensor, torch.Tensor] | None = None

    def seen(inputs: torch.Tensor, weight: torch.Tensor) -> None:
        nonlocal last
        if (key := place(weight)) not in places or not inputs.numel():
            return
        inputs_NI = inputs.detach().flatten(0, -2).float()
        if last is None or last[0] is not inputs:  # q, k and v have the same
            last = inputs, inputs_NI.T @ inputs_NI
        before = statistics.get(key, InputStatistics(torch.zeros_like(last[1]), 0))
        num_tokens = before.num_tokens + len(inputs_NI)
        statistics[key] = InputStatistics(before.gram + last[1], num_tokens)

    for row, call in zip(hidden, calls, strict=True):
        # Not hooks: experts are slices of one parameter, so no module is called for each.
        with LinearCalls(seen):
            run(layer, row, call)
        last = None
    return statistics


@dataclass(frozen=True)
class LayerwiseModel:
    """A model on the meta device, and the source of its weights."""

    model: PreTrainedModel
    source: TensorSource
    names: Mapping[str, str]  # of parameters: those in the source
    experts: Mapping[str, FusedPlacement]  # by name in the source, of what is no parameter there

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return layer_list(self.model)

    @torch.no_grad()
    def record(self, rows: Sequence[Sequence[int]]) -> tuple[list[torch.Tensor], list[list[Call]]]:
        """The hidden states [1, T, D] of each row before the first layer; of each layer, what it is
        called with besides."""
        places = self.layers
        layers = list(places)
        recorders = [_Recorder(layer, layer is layers[-1]) for layer in layers]
        for index, recorder in enumerate(recorders):
            places[index] = recorder
        decoder = self.model.base_model
        others = {id(p) for p in decoder.parameters()}
        names = [name for name, p in self.model.named_parameters() if id(p) in others]
        try:
            with self._loaded(names), _unfit():
                for row in rows:
                    with suppress(_AllCalledError):
                        ids = torch.tensor([list(row)], device=device())
                        # A cache in the recorded calls would grow with
                        # each of the two runs of a layer.
                        decoder(input_ids=ids, use_cache=False)
        finally:
            for index, layer in enumerate(layers):
                places[index] = layer
        return recorders[0].inputs, [recorder.calls for recorder in recorders]

    @contextmanager
    def loaded(self, index: int) -> Iterator[tuple[str, nn.Module]]:
        """The name of a layer, and the layer with its weights, while the block lasts."""
        layer = self.layers[index]
        prefix = next(name for name, module in self.model.named_modules() if module is layer)
        with self._loaded([f"{prefix}.{name}" for name, _ in layer.named_parameters()]):
            yield prefix, layer

    @contextmanager
    def _loaded(self, names: Sequence[str]) -> Iterator[None]:
        before = {}
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(parent)
            before[name] = module, leaf, module._parameters[leaf]
            module._parameters[leaf] = nn.Parameter(self._values(name), requires_grad=False)
        try:
            yield
        finally:
            for module, leaf, parameter in before.values():
                # The meta tensor comes back, and the memory of the layer is free.
                module._parameters[leaf] = parameter

    def _values(self, name: str) -> torch.Tensor:
        """Of a parameter, in float32."""
        parts = [(n, at) for n, at in self.experts.items() if at.fused == name]
        if not parts:
            return read_whole(self.source, self.names[name]).to(device(), torch.float32)
        values = torch.empty(parts[0][1].whole, device=device())
        for part, at in parts:
            expert, row, _ = at.start
            values[expert, row : row + at.shape[0]] = read_whole(self.source, part).to(device())
        return values


class _AllCalledError(Exception):
    """All layers were called; what comes after them is not computed."""


class _Recorder(nn.Module):
    """Takes the place of a layer, and keeps what it was called with."""

    def __init__(self, layer: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.layer = [layer]  # in a list, so that it is no submodule
        self.inputs: list[torch.Tensor] = []
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        """Attributes by which models choose masks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer[0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.inputs.append(hidden)
        self.calls.append((args, kwargs))
        if self.is_last:
            raise _AllCalledError
        return hidden


def open_layerwise(source: TensorSource, config: str | bytes, where: str) -> LayerwiseModel:
    """The model that ``config``, the text of ``config.json``, describes, with the weights of
    ``source``. Raises ``ModelError`` if it cannot be run layer by layer."""
    settings = json.loads(config, object_hook=_special_float)
    settings |= {"dtype": "float32", "quantization_config": None}
    model_config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    with torch.device("meta"):
        # experts one after another, so that the inputs of each are seen
        model: PreTrainedModel = auto_class(model_config).from_config(
            model_config, experts_implementation="eager"
        )
    if odd := fill_buffers(model):
        raise ModelError(f"{where}: nothing initializes {odd}; use --algorithm rtn")
    # It would be rounded twice, the second time what the first has made (decisions/0071).
    if shared := _shared(model):
        raise ModelError(
            f"{where}: {shared} is used in several places, so it cannot be calibrated in one; use "
            "--algorithm rtn"
        )
    stored = FullWeights(model).state_dict()
    names, experts = names_in_files(model, stored), places(model)
    joined = {at.fused for at in experts.values()}
    names = {name: in_files for name, in_files in names.items() if name not in joined}
    if missing := sorted(
        {*names.values(), *experts, *_buffers(model, stored)} - source.shapes().keys()
    ):
        raise ModelError(f"{where}: has no {missing[0]}, which the model needs")
    for in_files, (module, name) in _buffers(model, stored).items():
        values = read_whole(source, in_files)
        module._buffers[name] = values.to(module.get_buffer(name).dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device())
    return LayerwiseModel(model.eval(), source, names, experts)


def _special_float(value: dict[str, Any]) -> Any:
    """transformers writes infinity as an object."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _buffers(
    model: PreTrainedModel, stored: Mapping[str, torch.Tensor]
) -> dict[str, tuple[nn.Module, str]]:
    """The buffers that are in the files, by their name there."""
    names_by_place = {place(tensor): name for name, tensor in stored.items()}
    return {
        names_by_place[place(buffer)]: (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    }


def _shared(model: PreTrainedModel) -> str | None:
    """The name of a parameter of a decoder layer that other modules have, too."""
    in_layers = {id(p) for p in layer_list(model).parameters()}
    every = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    names = (n for n, p in model.named_parameters() if id(p) in in_layers and every[id(p)] > 1)
    return next(names, None)


@torch.no_grad()
def run(layer: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """The output of a layer."""
    args, kwargs = call
    with _unfit():
        outputs = layer(hidden, *args, **kwargs)
    output: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return output


@contextmanager
def _unfit() -> Iterator[None]:
    """A block in which a model's own errors say that it does not fit."""
    try:
        yield
    except _OF_MODELS as error:
        raise ModelError(
            f"the model cannot be run layer by layer: {first_line(error)}; use --algorithm rtn"
        ) from error


def calibration_rows(parts: ModelFolders, count: int) -> list[list[int]]:
    """The token ids of ``count`` rows of the run's training data: evenly spaced, or the first of a
    stream. Raises ``ModelError`` if there is no run, or too little data."""
    recipe = parts.recipe
    if recipe is None:
        raise ModelError(
            f"{parts.folder}: has no recipe, so no data to calibrate on; export the folder of a "
            "run, or use --algorithm rtn"
        )
    codec, rows = own_codec(recipe, codec_of(parts)), []
    for item in (_of_stream if recipe.data.streaming else _spaced)(recipe, codec, count):
        chat = with_chosen(item)
        name = next(name for name in chat if name.endswith("input_ids"))
        rows.append([int(i) for i in chat[name][:LONGEST]])
    if (tokens := sum(map(len, rows))) < FEWEST_IN_ALL:
        raise ModelError(
            f"{parts.folder}: {len(rows)} rows of its training data have {tokens} tokens in all, "
            f"too few to calibrate on (at least {FEWEST_IN_ALL}); use --algorithm rtn"
        )
    return rows


def _spaced(recipe: Recipe, codec: Codec, count: int) -> Iterator[Features]:
    data = prepare(encoding_of(recipe, codec)).train
    # Files are often sorted by source or by length, so the first rows are like each other.
    chosen = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int)
    yield from (data[int(index)] for index in np.unique(chosen))


def _of_stream(recipe: Recipe, codec: Codec, count: int) -> Iterator[Features]:
    """The first that are not held out; encoded as far as that takes."""
    data = open_stream(encoding_of(recipe, codec))
    held_out = set(data.held.tolist())
    num_encoded = min(data.train.reach(count + len(held_out)), count + len(held_out))
    chosen = [item for item in range(num_encoded) if item not in held_out]
    yield from (data.train[item] for item in chosen[:count])
