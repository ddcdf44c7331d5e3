"""Run the decoder layers of a model one after the other, with one of them in memory at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...checkpoint.sources.source import TensorSource, read_whole
from ...errors import ModelError
from ...model.loading import device, fill_buffers
from ...model.lora_targets import layer_list
from ...model.weights import FullWeights, FusedPlacement, names_in_files, place, places

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer gets besides the hidden states


_OF_MODELS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)  # that do not fit


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
                        decoder(input_ids=ids, use_cache=False)
        finally:
            for index, layer in enumerate(layers):
                places[index] = layer
        return recorders[0].inputs, [one.calls for one in recorders]

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
                module._parameters[leaf] = parameter

    def _values(self, name: str) -> torch.Tensor:
        """Of a parameter, in float32."""
        parts = [(n, at) for n, at in self.experts.items() if at.fused == name]
        if not parts:
            return read_whole(self.source, self.names[name]).to(device(), torch.float32)
        found = torch.empty(parts[0][1].whole, device=device())
        for part, at in parts:
            expert, row, _ = at.start
            found[expert, row : row + at.shape[0]] = read_whole(self.source, part).to(device())
        return found


def open_layerwise(source: TensorSource, config: str | bytes, where: str) -> LayerwiseModel:
    """The model that ``config``, the text of ``config.json``, describes, with the weights of
    ``source``. Raises ``ModelError`` if it cannot be run layer by layer."""
    known = json.loads(config, object_hook=_special_float)
    known |= {"dtype": "float32", "quantization_config": None}
    found = CONFIG_MAPPING[known["model_type"]].from_dict(known)
    with torch.device("meta"):
        # experts one after another, so that the inputs of each are seen
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            found, experts_implementation="eager"
        )
    if odd := fill_buffers(model):
        raise ModelError(f"{where}: nothing initializes {odd}; use --algorithm rtn")
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
    known = {place(tensor): name for name, tensor in stored.items()}
    return {
        known[place(buffer)]: (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    }


def _shared(model: PreTrainedModel) -> str | None:
    """The name of a parameter of a decoder layer that other modules have, too."""
    own = {id(p) for p in layer_list(model).parameters()}
    every = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    names = (n for n, p in model.named_parameters() if id(p) in own and every[id(p)] > 1)
    return next(names, None)


@contextmanager
def _unfit() -> Iterator[None]:
    """A block in which a model's own errors say that it does not fit."""
    try:
        yield
    except _OF_MODELS as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the model cannot be run layer by layer: {said}; use --algorithm rtn"
        ) from error


@torch.no_grad()
def run(layer: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """The output of a layer."""
    args, kwargs = call
    with _unfit():
        found = layer(hidden, *args, **kwargs)
    output: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return output
