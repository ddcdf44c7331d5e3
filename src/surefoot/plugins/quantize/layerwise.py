"""A model that is run one decoder layer at a time, and has the weights of that layer only.

``open_layerwise`` makes it on the meta device. ``LayerwiseModel.record`` runs what is before the
layers, and notes what each of them is called with. A layer has its weights while a block of
``loaded`` lasts, and ``run_layer`` calls it as the model would. ``calibration`` is what calls them.

Shapes: T tokens of a row, D hidden size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...checkpoint.sources import TensorSource, read_whole
from ...errors import ModelError, first_line
from ...model.config import auto_class
from ...model.loading import device, fill_buffers
from ...model.weight_matrices import layer_list
from ...model.weights import FullWeights, FusedPlacement, names_in_files, place, places

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a layer besides hidden states


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
    if uninitialized := fill_buffers(model):
        raise ModelError(f"{where}: nothing initializes {uninitialized}; use --algorithm rtn")
    # It would be rounded twice, the second time what the first has made (decisions/0071).
    if shared := _shared_parameter(model):
        raise ModelError(
            f"{where}: {shared} is used in several places, so it cannot be calibrated in one; use "
            "--algorithm rtn"
        )
    stored = FullWeights(model).state_dict()
    buffers, experts = _stored_buffers(model, stored), places(model)
    fused = {at.fused for at in experts.values()}
    names = {n: stored_n for n, stored_n in names_in_files(model, stored).items() if n not in fused}
    if missing := sorted({*names.values(), *experts, *buffers} - source.shapes().keys()):
        raise ModelError(f"{where}: has no {missing[0]}, which the model needs")
    for stored_name, (module, name) in buffers.items():
        values = read_whole(source, stored_name)
        module._buffers[name] = values.to(module.get_buffer(name).dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device())
    return LayerwiseModel(model.eval(), source, names, experts)


def _special_float(value: dict[str, Any]) -> Any:
    """transformers writes infinity as an object."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _shared_parameter(model: PreTrainedModel) -> str | None:
    """The name of a parameter of a decoder layer that other modules have, too."""
    in_layers = {id(p) for p in layer_list(model).parameters()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    names = (n for n, p in model.named_parameters() if id(p) in in_layers and uses[id(p)] > 1)
    return next(names, None)


def _stored_buffers(
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
        decoder, layers = self.model.base_model, list(self.layers)
        hidden_states: list[torch.Tensor] = []
        calls: list[list[Call]] = [[] for _ in layers]

        def recording(index: int) -> Callable[..., torch.Tensor]:
            def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if index == 0:
                    hidden_states.append(hidden)
                calls[index].append((args, kwargs))
                if index == len(layers) - 1:
                    raise _AllCalledError
                return hidden

            return forward

        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        others = {id(p) for p in decoder.parameters()} - in_layers
        names = [name for name, p in self.model.named_parameters() if id(p) in others]
        for index, layer in enumerate(layers):
            layer.forward = recording(index)
        try:
            with self._loaded(names), _raising_model_errors():
                for row in rows:
                    with suppress(_AllCalledError):
                        ids = torch.tensor([list(row)], device=device())
                        # A cache in the recorded calls would grow with
                        # each of the two runs of a layer.
                        decoder(input_ids=ids, use_cache=False)
        finally:
            for layer in layers:
                del layer.forward
        return hidden_states, calls

    @contextmanager
    def loaded(self, index: int) -> Iterator[tuple[str, nn.Module]]:
        """The name of a layer, and the layer with its weights, while the block lasts."""
        layer = self.layers[index]
        prefix = next(name for name, module in self.model.named_modules() if module is layer)
        with self._loaded([f"{prefix}.{name}" for name, _ in layer.named_parameters()]):
            yield prefix, layer

    @contextmanager
    def _loaded(self, names: Sequence[str]) -> Iterator[None]:
        meta_parameters = []
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(parent)
            meta_parameters.append((module, leaf, module._parameters[leaf]))
            module._parameters[leaf] = nn.Parameter(self._values(name), requires_grad=False)
        try:
            yield
        finally:
            for module, leaf, meta_parameter in meta_parameters:
                module._parameters[leaf] = meta_parameter  # which frees the memory of the values

    def _values(self, name: str) -> torch.Tensor:
        """Of a parameter, in float32."""
        experts = [(stored, at) for stored, at in self.experts.items() if at.fused == name]
        if not experts:
            return read_whole(self.source, self.names[name]).to(device(), torch.float32)
        values = torch.empty(experts[0][1].whole, device=device())
        for stored, at in experts:
            expert, row, _ = at.start
            matrix = read_whole(self.source, stored)
            values[expert, row : row + at.shape[0]] = matrix.to(device())
        return values


class _AllCalledError(Exception):
    """All layers were called; what comes after them is not computed."""


@torch.no_grad()
def run_layer(layer: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """The output of a layer."""
    args, kwargs = call
    with _raising_model_errors():
        outputs = layer(hidden, *args, **kwargs)
    output: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return output


@contextmanager
def _raising_model_errors() -> Iterator[None]:
    """A block in which errors of a model's own code say that it does not fit."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        raise ModelError(
            f"the model cannot be run layer by layer: {first_line(error)}; use --algorithm rtn"
        ) from error
