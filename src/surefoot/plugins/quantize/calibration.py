"""Calibrate quantized weights on rows of the run's training data, one decoder layer at a time.

Each layer gets the hidden states that the layers before it, already quantized, compute.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.copying import copy
from ...checkpoint.sources.source import JoinedSource, Renamed, TensorsInMemory, TensorSource
from ...errors import ModelError
from .gptq import output_error, round_by_gptq, round_to_nearest
from .inputs import InputStatistics, Place, QuantizedMatrix, matrices_of, statistics_of
from .layerwise import Call, LayerwiseModel, run
from .linear_layers import LinearLayers
from .quantized_source import QuantizedSource
from .rows import FEWEST
from .schemes import WeightScheme

logger = logging.getLogger(__name__)


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
        count, chosen, dtypes = len(self.model.layers), [], self.model.source.dtypes()
        num_weights = 0
        for index in range(count):
            with self.model.loaded(index) as (prefix, module):
                matrices = matrices_of(module, prefix, self.layers, dtypes)
                layer = _Layer(module, prefix, matrices, hidden, calls[index])
                tensors = self._gptq(layer)
                num_weights += len(matrices)
                for row, call in enumerate(calls[index]):
                    hidden[row] = run(module, hidden[row], call)
            _refuse_infinite(hidden, prefix)
            copy(TensorsInMemory(tensors), scratch / str(index))
            chosen.append(("", open_folder(scratch / str(index))))
            calls[index] = []
            logger.info("calibrated layer %d of %d", index + 1, count)
        if self.rounded:
            logger.warning(
                "%d of %d weights got too few tokens of the calibration rows (an expert needs %d), "
                "and are rounded to nearest (%s, for example)",
                *(len(self.rounded), num_weights, FEWEST, self.rounded[0]),
            )
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

    def _statistics(self, layer: _Layer) -> Mapping[Place, InputStatistics]:
        """Of the inputs. Raises ``ModelError`` for weights and inputs that are not finite."""
        for matrix in layer.matrices:
            self._stored(matrix)
        found = statistics_of(layer.module, layer.matrices, layer.hidden, layer.calls)
        _refuse_infinite([one.gram for one in found.values()], layer.prefix)
        return found

    def _enough(
        self, matrix: QuantizedMatrix, statistics: Mapping[Place, InputStatistics]
    ) -> InputStatistics | None:
        """Those of a matrix, unless there are none, or an expert has few."""
        found = statistics.get(matrix.place)
        if found is not None and (found.num_tokens >= FEWEST or not matrix.is_expert):
            return found
        self.rounded.append(matrix.name)
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
