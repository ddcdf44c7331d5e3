"""Calibrate quantized weights on rows of the run's training data, one decoder layer at a time.

Each layer gets the hidden states that the layers before it, already quantized, compute.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.copying import copy
from ...checkpoint.sources.joined import JoinedSource
from ...checkpoint.sources.source import Renamed, TensorsInMemory, TensorSource
from ...data.text.pairs import with_chosen
from ...errors import ModelError
from ...recipe.recipe_data import prepared
from ..held_out_set import own_codec
from ..model_loading import ModelFolders, codec_of
from .gptq import output_error, round_by_gptq
from .layerwise import Call, LayerwiseModel, run
from .linear_layers import LinearLayers
from .quantized_source import QuantizedSource
from .schemes import WeightScheme

logger = logging.getLogger(__name__)
LONGEST = 2048  # tokens of a row


def calibration_rows(parts: ModelFolders, count: int) -> list[list[int]]:
    """The token ids of ``count`` rows of the run's training data, evenly spaced. Raises
    ``ModelError`` if there is no run."""
    if parts.recipe is None:
        raise ModelError(
            f"{parts.folder}: has no recipe, so no data to calibrate on; export the folder of a "
            "run, or use --algorithm rtn"
        )
    if parts.recipe.data.streaming:
        raise ModelError(
            f"{parts.folder}: its run streams its data (data.streaming), of which no rows are "
            "chosen; use --algorithm rtn"
        )
    data = prepared(parts.recipe, own_codec(parts.recipe, codec_of(parts))).train
    chosen = np.unique(np.linspace(0, len(data) - 1, min(count, len(data))).astype(int))
    found = []
    for index in chosen:
        item = with_chosen(data[int(index)])
        name = next(name for name in item if name.endswith("input_ids"))
        found.append([int(i) for i in item[name][:LONGEST]])
    return found


def calibrated(
    model: LayerwiseModel,
    layers: LinearLayers,
    scheme: WeightScheme,
    rows: Sequence[Sequence[int]],
    scratch: Path,
) -> TensorSource:
    """The tensors of the quantized model: those of decoder layers chosen by GPTQ on ``rows``, and
    stored in the new folder ``scratch``; the others as ``QuantizedSource`` has them."""
    hidden, calls = model.record(rows)
    count, chosen = len(model.layers), []
    for place in range(count):
        with model.loaded(place) as layer:
            prefix = next(n for n, m in model.model.named_modules() if m is layer)
            own = {
                module: layers.weights[f"{prefix}.{name}"]
                for name, module in layer.named_modules()
                if f"{prefix}.{name}" in layers.weights
            }
            tensors = _layer(layer, own, hidden, calls[place], scheme, model.source.dtypes())
            hidden = [run(layer, one, call) for one, call in zip(hidden, calls[place], strict=True)]
        copy(TensorsInMemory(tensors), scratch / str(place))
        chosen.append(("", open_folder(scratch / str(place))))
        calls[place] = []
        logger.info("calibrated layer %d of %d", place + 1, count)
    done = {name for _, source in chosen for name in source.shapes()}
    plain = QuantizedSource(model.source, scheme, frozenset(layers.weights.values()))
    left = Renamed(plain, {name: name for name in plain.shapes() if name not in done})
    return JoinedSource([("", left), *chosen])


def _layer(
    layer: nn.Module,
    own: Mapping[nn.Module, str],
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
    scheme: WeightScheme,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, torch.Tensor]:
    """The tensors of one layer, whose weights become those that they stand for."""
    hessians = _hessians(layer, own, hidden, calls)
    found: dict[str, torch.Tensor] = {}
    for module, name in own.items():
        weight = module.get_parameter("weight")
        stored = weight.detach().to(dtypes[name])
        if not stored.isfinite().all():
            raise ModelError(f"{name}: it contains NaN or infinite values; nothing was written")
        values = round_by_gptq(stored, hessians[module], scheme)
        scales, zeros = scheme.scales(stored)
        logger.debug(
            "%s: error of outputs %.2e", name, output_error(weight, values, hessians[module])
        )
        weight.data = values
        packed = scheme.packed(values.cpu(), scales.cpu(), zeros.cpu())
        found |= {f"{name.removesuffix('weight')}{role}": t for role, t in packed.items()}
    return found


def _hessians(
    layer: nn.Module,
    own: Mapping[nn.Module, str],
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
) -> dict[nn.Module, torch.Tensor]:
    """X'X of the inputs of each linear layer."""
    found: dict[nn.Module, torch.Tensor] = {}

    def add(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs_NI = args[0].detach().flatten(0, -2).float()
        product_II = inputs_NI.T @ inputs_NI
        found[module] = found[module] + product_II if module in found else product_II

    hooks = [module.register_forward_pre_hook(add) for module in own]
    try:
        for one, call in zip(hidden, calls, strict=True):
            run(layer, one, call)
    finally:
        for hook in hooks:
            hook.remove()
    return found
