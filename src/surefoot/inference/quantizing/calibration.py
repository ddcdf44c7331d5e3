"""Calibrate quantized weights on rows of the run's training data, one decoder layer at a time.

Each layer gets the hidden states that the layers before it, already quantized, compute.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.copying import copy
from ...checkpoint.sources.joined import JoinedSource
from ...checkpoint.sources.source import Renamed, TensorsInMemory, TensorSource
from ...errors import ModelError
from ...model.pretrained.weights import place
from .awq import round_to_nearest, scales_of
from .foldings import Folding, find_foldings
from .gptq import output_error, round_by_gptq
from .inputs import InputStatistics, Place, QuantizedMatrix, matrices_of, statistics_of
from .layerwise import Call, LayerwiseModel, run
from .linear_layers import LinearLayers
from .quantized_source import QuantizedSource
from .rows import FEWEST
from .schemes import WeightScheme
from .trial import LayerTrial

logger = logging.getLogger(__name__)
Calibration = Literal["gptq", "awq"]
_SAMPLE = 16  # rows on which AWQ's scales are tried


@dataclass
class CalibrationReport:
    """What was done, and what was not done as asked."""

    num_weights: int = 0
    rounded: list[str] = field(default_factory=list)  # by GPTQ, of too few tokens
    num_scaled: int = 0  # by AWQ
    unscaled: Counter[str] = field(default_factory=Counter)  # by AWQ: of no layer that divides

    def as_settings(self, algorithm: Calibration) -> dict[str, int]:
        """For the receipt."""
        if algorithm == "gptq":
            return {"num_rounded": len(self.rounded)} if self.rounded else {}
        return {"num_scaled": self.num_scaled, "num_unscaled": self.num_weights - self.num_scaled}

    def log(self, algorithm: Calibration) -> None:
        """Say it."""
        if self.rounded:
            logger.warning(
                "%d of %d weights got too few tokens of the calibration rows (an expert needs %d), "
                "and are rounded to nearest (%s, for example)",
                *(len(self.rounded), self.num_weights, FEWEST, self.rounded[0]),
            )
        if algorithm == "awq":
            logger.info(
                "AWQ: %d of %d weights are scaled; the others lose less as they are",
                *(self.num_scaled, self.num_weights),
            )
        if self.unscaled:
            kinds = ", ".join(f"{name} ({count})" for name, count in sorted(self.unscaled.items()))
            logger.warning(
                "AWQ: rounded as they are, because no layer before them can be divided without a "
                "change of what the model computes: %s",
                kinds,
            )


@dataclass(frozen=True)
class _Layer:
    """A decoder layer with its weights in memory."""

    module: nn.Module
    prefix: str
    matrices: Sequence[QuantizedMatrix]
    hidden: Sequence[torch.Tensor]  # [1, T, D] of each row
    calls: Sequence[Call]


@dataclass(frozen=True)
class Calibrator:
    """Chooses the quantized weights of a model."""

    model: LayerwiseModel
    layers: LinearLayers
    scheme: WeightScheme
    algorithm: Calibration
    report: CalibrationReport = field(default_factory=CalibrationReport)

    @torch.no_grad()
    def run(self, rows: Sequence[Sequence[int]], scratch: Path) -> TensorSource:
        """The tensors of the quantized model: those of decoder layers chosen on ``rows``, and
        stored in the new folder ``scratch``; the others as ``QuantizedSource`` has them."""
        hidden, calls = self.model.record(rows)
        _refuse_infinite(hidden, "the embeddings")
        count, chosen, dtypes = len(self.model.layers), [], self.model.source.dtypes()
        for index in range(count):
            with self.model.loaded(index) as (prefix, module):
                matrices = matrices_of(module, prefix, self.layers, dtypes)
                layer = _Layer(module, prefix, matrices, hidden, calls[index])
                tensors = self._gptq(layer) if self.algorithm == "gptq" else self._awq(layer)
                self.report.num_weights += len(matrices)
                for row, call in enumerate(calls[index]):
                    hidden[row] = run(module, hidden[row], call)
            _refuse_infinite(hidden, prefix)
            copy(TensorsInMemory(tensors), scratch / str(index))
            chosen.append(("", open_folder(scratch / str(index))))
            calls[index] = []
            logger.info("calibrated layer %d of %d", index + 1, count)
        self.report.log(self.algorithm)
        done = {name for _, source in chosen for name in source.shapes()}
        plain = QuantizedSource(self.model.source, self.scheme, self.layers.names)
        left = Renamed(plain, {name: name for name in plain.shapes() if name not in done})
        return JoinedSource([("", left), *chosen])

    def _gptq(self, layer: _Layer) -> dict[str, torch.Tensor]:
        """The tensors of a layer, whose weights become those that they stand for."""
        statistics = self._statistics(layer)
        found: dict[str, torch.Tensor] = {}
        for matrix in layer.matrices:
            inputs = self._enough(matrix, statistics)
            stored = self._stored(matrix)
            if inputs is None:
                values = round_to_nearest(stored.float(), self.scheme, stored.dtype)
            else:
                values = round_by_gptq(stored, inputs.gram, self.scheme)
                error = output_error(matrix.weight, values, inputs.gram)
                logger.debug("%s: error of outputs %.2e", matrix.name, error)
            found |= self._packed(matrix, values, stored)
        return found

    def _awq(self, layer: _Layer) -> dict[str, torch.Tensor]:
        """The same, and the norms, biases and routers that have changed."""
        statistics = self._statistics(layer)
        changed = self._scale(layer, statistics)
        found: dict[str, torch.Tensor] = {}
        for matrix in layer.matrices:
            stored = self._stored(matrix)
            values = round_to_nearest(matrix.weight, self.scheme, stored.dtype)
            found |= self._packed(matrix, values, stored)
        dtypes = self.model.source.dtypes()
        for name, parameter in layer.module.named_parameters():
            if id(parameter) in changed:
                in_files = self.model.names[f"{layer.prefix}.{name}"]
                values = parameter.detach().to(dtypes[in_files])
                parameter.copy_(values)
                found[in_files] = values.cpu()
        return found

    def _statistics(self, layer: _Layer) -> Mapping[Place, InputStatistics]:
        """Of the inputs. Raises ``ModelError`` for weights and inputs that are not finite."""
        for matrix in layer.matrices:
            self._stored(matrix)
        found = statistics_of(layer.module, layer.matrices, layer.hidden, layer.calls)
        _refuse_infinite([one.gram for one in found.values()], layer.prefix)
        return found

    def _scale(self, layer: _Layer, statistics: Mapping[Place, InputStatistics]) -> set[int]:
        """Fold the best scales into the weights of a layer; the ids of parameters that are
        not quantized and have changed."""
        dtypes, quantized = self._dtypes(layer), self._quantized(layer)
        own = {key: dtype for key, dtype in dtypes.items() if key in quantized}
        longest = max(range(len(layer.hidden)), key=lambda i: layer.hidden[i].shape[1])
        row = layer.hidden[longest], layer.calls[longest]
        found = find_foldings(layer.module, *row, self.model.head_size, quantized)
        scaled = [(one, scales_of(one, statistics, self.scheme, own)) for one in found]
        step = -(-len(layer.hidden) // _SAMPLE)
        rows = list(zip(layer.hidden[::step], layer.calls[::step], strict=True))
        trial = LayerTrial(layer.module, layer.matrices, rows, self.scheme, dtypes)
        better = trial.fold_better([(one, s) for one, s in scaled if s is not None])
        self._count(layer, found, [folding for folding, _ in better])
        return {id(one) for folding, _ in better for one in folding.touched} - quantized

    def _dtypes(self, layer: _Layer) -> dict[int, torch.dtype]:
        """In the files, by the id of each parameter."""
        own = layer.module.named_parameters()
        return {id(p): self.model.dtype_of(f"{layer.prefix}.{name}") for name, p in own}

    def _quantized(self, layer: _Layer) -> set[int]:
        """The ids of parameters that contain weights to quantize."""
        places = {matrix.place[0] for matrix in layer.matrices}
        return {id(p) for p in layer.module.parameters() if place(p.detach())[0] in places}

    def _count(self, layer: _Layer, found: Sequence[Folding], done: Sequence[Folding]) -> None:
        """Which weights are scaled, and which cannot be."""
        scalable, scaled = (
            {place(weight.detach())[0] for folding in some for weight in folding.consumers}
            for some in (found, done)
        )
        for matrix in layer.matrices:
            if matrix.place[0] in scaled:
                self.report.num_scaled += 1
            elif matrix.place[0] not in scalable:
                kind = matrix.name.removesuffix(".weight").rpartition(".")[2]
                self.report.unscaled[kind] += 1

    def _enough(
        self, matrix: QuantizedMatrix, statistics: Mapping[Place, InputStatistics]
    ) -> InputStatistics | None:
        """Those of a matrix, unless there are none, or an expert has few."""
        found = statistics.get(matrix.place)
        if found is not None and (found.num_tokens >= FEWEST or not matrix.is_expert):
            return found
        self.report.rounded.append(matrix.name)
        return None

    def _stored(self, matrix: QuantizedMatrix) -> torch.Tensor:
        """The weight in the type of the files."""
        stored = matrix.weight.to(matrix.dtype)
        if not stored.isfinite().all():
            raise ModelError(
                f"{matrix.name}: it contains NaN or infinite values; nothing was written"
            )
        return stored

    def _packed(
        self, matrix: QuantizedMatrix, values: torch.Tensor, stored: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The tensors of a weight, which becomes ``values``."""
        scales, zeros = self.scheme.scales(stored)
        matrix.weight.copy_(values)
        packed = self.scheme.packed(values.cpu(), scales.cpu(), zeros.cpu())
        return {f"{matrix.name.removesuffix('weight')}{role}": t for role, t in packed.items()}


def _refuse_infinite(values: Sequence[torch.Tensor], where: str) -> None:
    """Raise ``ModelError`` for what no weight can be calibrated on."""
    if not all(one.isfinite().all() for one in values):
        raise ModelError(
            f"{where}: what it computes of the training data contains NaN or infinite values; "
            "nothing was written"
        )
