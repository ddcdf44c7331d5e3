"""Calibrate quantized weights by GPTQ, on rows of the run's training data.

``Calibrator.run`` is the way through. One decoder layer is in memory at a time (``layerwise``). It
gets the hidden states that the layers before it, already quantized, compute, and its weights are
chosen so that its outputs on them change least. What its linear maps get as inputs is seen as they
are called. So an expert is calibrated on the tokens that the router sends to it, whatever the
architecture.

GPTQ (arXiv:2210.17323) rounds a weight column by column, and corrects the columns that follow for
what each has lost. With inputs X [N, I] and H = X'X, what is minimized is tr((W - Q) H (W - Q)').

Legend of shapes: N tokens, O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...batch import Features
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources import JoinedSource, Renamed, TensorsInMemory, TensorSource, copy
from ...data.text.collation import with_chosen
from ...data.training_data import Encoding, open_stream, prepare
from ...errors import ModelError
from ...model.weights import place
from ...run.parts import RunParts
from ...use.model_loading import ModelFolders, codec_of
from ...use.run_evaluation import parts_of_start
from .layerwise import Call, LayerwiseModel, run_layer
from .schemes import LinearLayers, QuantizedSource, WeightScheme

logger = logging.getLogger(__name__)
_BLOCK = 128  # columns whose corrections are applied to the others at once
DAMPING = 0.01  # of the mean of H's diagonal, which is added to it
LONGEST = 2048  # tokens of a row
FEWEST = 128  # tokens of an expert; of fewer, GPTQ would learn only these
FEWEST_IN_ALL = FEWEST  # of all rows
Place = tuple[int, int, int]  # of a matrix in memory; see ``model.weights.place``


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
            with self.model.loaded(index) as (prefix, layer):
                matrices = matrices_of(layer, prefix, self.layers, dtypes)
                num_weights += len(matrices)
                for matrix in matrices:
                    _stored(matrix)  # is finite, before its outputs are not
                statistics = statistics_of(layer, matrices, hidden, layer_calls)
                _refuse_infinite([inputs.gram for inputs in statistics.values()], prefix)
                tensors: dict[str, torch.Tensor] = {}
                for matrix in matrices:
                    tensors |= self._quantized(matrix, statistics.get(matrix.place))
                for row, call in enumerate(layer_calls):
                    # With the weights of the file: these outputs are what the next layer will get.
                    hidden[row] = run_layer(layer, hidden[row], call)
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
        calibrated = {name for source in sources for name in source.shapes()}
        rounded = QuantizedSource(self.model.source, self.scheme, self.layers.names)
        others = {name: name for name in rounded.shapes() if name not in calibrated}
        return JoinedSource([("", Renamed(rounded, others)), *(("", source) for source in sources)])

    def _quantized(
        self, matrix: QuantizedMatrix, inputs: InputStatistics | None
    ) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, which becomes what they stand for."""
        stored = _stored(matrix)
        # A router may send an expert next to nothing, which GPTQ would learn by heart
        # (decisions/0071).
        if inputs is None or (matrix.is_expert and inputs.num_tokens < FEWEST):
            self.rounded.append(matrix.name)
            values = round_to_nearest(stored, self.scheme)
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


def round_to_nearest(weight_OI: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """The values [O, I] float32 that ``weight_OI`` has in the file if it is not calibrated."""
    scales_OI = _scales_of_weights(weight_OI, scheme)
    low, high = _range(scheme)
    return (weight_OI.float() / scales_OI).round().clamp(low, high) * scales_OI


def round_by_gptq(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """The values [O, I] float32 that take the place of ``weight_OI``, each a multiple of its scale.

    The scales are those of the unchanged weight. Columns are rounded in the order of their inputs'
    energy, greatest first; the layout of the files does not depend on that order.
    """
    low, high = _range(scheme)
    # The scales stay with their columns, so the files need no ``g_idx``, which tells the groups of
    # columns apart where they were put into another order.
    order_I = hessian_II.diagonal().argsort(descending=True)
    scales_OI = _scales_of_weights(weight_OI, scheme)[:, order_I]
    remaining_OI = weight_OI.float()[:, order_I]
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


def _range(scheme: WeightScheme) -> tuple[int, int]:
    """The smallest and the largest integer."""
    half = 2 ** (scheme.args.num_bits - 1)
    return -half, half - 1


def _scales_of_weights(weight_OI: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """[O, I] float32 the scale of each weight: that of its group."""
    scales_OG = scheme.scales(weight_OI)[0].float()
    return scales_OG.repeat_interleave(weight_OI.shape[1] // scales_OG.shape[1], 1)


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
            # gate and up are rows of one matrix, and get the same inputs
            multiplied = parameters[at.fused].detach()[expert]
            weight = multiplied[row : row + at.shape[0]]
            key = place(multiplied)
            matrices.append(QuantizedMatrix(name, weight, dtypes[name], key, is_expert=True))
    return matrices


def statistics_of(
    layer: nn.Module,
    matrices: Sequence[QuantizedMatrix],
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
) -> Mapping[Place, InputStatistics]:
    """Of the inputs of all ``matrices`` of ``layer`` that get any."""
    # Not hooks: experts are slices of one parameter, so no module is called for each.
    linear_inputs = _LinearInputs({matrix.place for matrix in matrices})
    for row, call in zip(hidden, calls, strict=True):
        with linear_inputs:
            run_layer(layer, row, call)
        linear_inputs.latest = None
    return linear_inputs.statistics


class _LinearInputs(TorchFunctionMode):
    """Sums up, while a block lasts, the inputs of every linear map whose weight is in ``places``;
    all is computed as without it."""

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self.places = places
        self.statistics: dict[Place, InputStatistics] = {}
        self.latest: tuple[torch.Tensor, torch.Tensor] | None = None  # inputs, and X'X of them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, whose inputs are added if it is a linear map."""
        named = kwargs or {}
        if func is F.linear:
            self._add(*(*args, *(named[n] for n in ("input", "weight") if n in named))[:2])
        return func(*args, **named)

    def _add(self, inputs: torch.Tensor, weight: torch.Tensor) -> None:
        key = place(weight)
        if key not in self.places or not inputs.numel():
            return
        inputs_NI = inputs.detach().flatten(0, -2).float()
        if self.latest is None or self.latest[0] is not inputs:  # q, k and v have the same
            self.latest = inputs, inputs_NI.T @ inputs_NI
        gram_II = self.latest[1]
        before = self.statistics.get(key, InputStatistics(torch.zeros_like(gram_II), 0))
        self.statistics[key] = InputStatistics(
            before.gram + gram_II, before.num_tokens + len(inputs_NI)
        )


def calibration_rows(parts: ModelFolders, count: int) -> list[list[int]]:
    """The token ids of ``count`` rows of the run's training data: evenly spaced, or the first of a
    stream. Raises ``ModelError`` if there is no run, or too little data."""
    recipe = parts.recipe
    if recipe is None:
        raise ModelError(
            f"{parts.folder}: has no recipe, so no data to calibrate on; export the folder of a "
            "run, or use --algorithm rtn"
        )
    run = parts_of_start(recipe) or RunParts.around(recipe, codec_of(parts), parts.model)
    read, rows = _of_stream if run.data.streaming else _spaced, []
    for item in read(run.encoding, count):
        chat = with_chosen(item)
        name = next(name for name in chat if name.endswith("input_ids"))
        rows.append([int(i) for i in chat[name][:LONGEST]])
    if (tokens := sum(map(len, rows))) < FEWEST_IN_ALL:
        raise ModelError(
            f"{parts.folder}: {len(rows)} rows of its training data have {tokens} tokens in all, "
            f"too few to calibrate on (at least {FEWEST_IN_ALL}); use --algorithm rtn"
        )
    return rows


def _spaced(encoding: Encoding, count: int) -> Iterator[Features]:
    data = prepare(encoding).train
    # Files are often sorted by source or by length, so the first rows are like each other.
    chosen = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int)
    yield from (data[int(index)] for index in np.unique(chosen))


def _of_stream(encoding: Encoding, count: int) -> Iterator[Features]:
    """The first that are not held out; encoded as far as that takes."""
    data = open_stream(encoding)
    held_out = set(data.held.tolist())
    num_encoded = min(data.train.reach(count + len(held_out)), count + len(held_out))
    chosen = [item for item in range(num_encoded) if item not in held_out]
    yield from (data.train[item] for item in chosen[:count])
