"""A model on the meta device: how it is built there, and what its code does there.

Build a pretrained model on the meta device: module structure, dtypes and tied weights, without
allocating memory.

transformers itself loads it, from meta tensors with the names, shapes and dtypes of those in the
files. So it renames, converts, ties and reports errors as for any model, and reads no values.

Run a model's code on the meta device: what it does with tensors, whatever they contain.

Whether a model has memory or is on the meta device, meta tensors take the place of its own
meanwhile. So the answer is the same in a first start and in a resumed one, and nothing
that the model's code does to itself stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .pretrained.quantized import as_dequantized, quantization_of
from .pretrained.weights import place
from .section import ModelSection

Tensors = Mapping[str, torch.Tensor]


def why_not_empty(folder: Path, section: ModelSection) -> str | None:
    """Why the model in ``folder`` can only be loaded in full; None if in shards, too."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    is_theirs = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    has_ours = type(config) in AutoModelForCausalLM._model_mapping
    if not has_ours or (is_theirs and section.trust_remote_code):
        return "it has custom code"
    if quantization_of(as_dequantized(config)) is not None:
        return "its weights are quantized"
    return None


def fill_buffers(model: PreTrainedModel) -> str | None:
    """Give the buffers of a meta ``model`` that are in no file the values that the architecture
    initializes them with, on the CPU. Returns the name of one that it does not initialize: such a
    model must be loaded in full."""
    found, again = (_initialized_over(model, is_first=is_first) for is_first in (True, False))
    for name, values in found.items():
        if not torch.equal(values.nan_to_num(), again[name].nan_to_num()):
            return name
    return None


def _initialized_over(model: PreTrainedModel, *, is_first: bool) -> dict[str, torch.Tensor]:
    """The buffers after initialization over one of two fillings: what differs afterwards is what
    was in memory before."""
    found = {}
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        filler = 0 if is_first else 1
        found[name] = torch.full_like(buffer, filler, device="cpu")
        model.get_submodule(parent)._buffers[leaf] = found[name]
    for module in model.modules():  # all: a model may initialize the buffers of its layers
        module._is_hf_initialized = False  # as transformers marks it
    model.initialize_weights()
    return dict(model.named_non_persistent_buffers())


def names_stored(model: PreTrainedModel, stored: Tensors) -> dict[str, str]:
    """For each tensor of ``model``, tied ones once, the name in the files of that with its values,
    unless it is fused from several."""
    prefix = f"{model.base_model_prefix}."  # which files of the bare model do not have
    known: dict[object, list[str]] = {}
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        found = known.setdefault((place(tensor), tensor.shape), [])
        found += [n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored]
    places = {name: known.get((place(t), t.shape), []) for name, t in kept_tensors(model)}
    return {name: found[0] for name, found in places.items() if found}


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that are saved in files of ``model``, tied ones once."""
    yield from model.named_parameters()
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device``; meta tensors get memory, and tied weights stay tied."""
    first = {id(p): name for name, p in model.named_parameters()}
    tied = [
        (name, first[id(p)])
        for name, p in model.named_parameters(remove_duplicate=False)
        if first[id(p)] != name
    ]
    move = lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)  # noqa: E731
    model._apply(move)  # type: ignore[no-untyped-call]
    for name, same in tied:
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._parameters[leaf] = model.get_parameter(same)


class CapturedInit(TorchFunctionMode):
    """While it is active, values of tensors that are moved or copied to the meta device are
    captured: so PEFT initializes an adapter for a meta model with its own random numbers. Of a copy
    of a meta tensor, it is captured which one that was."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}  # the key stays alive
        self._sources: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The captured values of ``tensor``, which is on the meta device."""
        _, values = self._values.get(place(tensor), (None, None))
        return values if values is not None and values.shape == tensor.shape else None

    def source_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The meta tensor of which ``tensor`` is a copy."""
        _, source = self._sources.get(place(tensor), (None, None))
        return source if source is not None and source.shape == tensor.shape else None

    def __torch_function__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if func in (torch.Tensor.to, torch.Tensor.copy_) and result.is_meta:
            given = args[0] if func is torch.Tensor.to else args[1]
            assert isinstance(given, torch.Tensor)
            values = self.of(given) if given.is_meta else given.detach()
            if values is not None:
                self._values[place(result)] = result, values.to(result.dtype)
            elif func is torch.Tensor.copy_:
                self._sources[place(result)] = result, given
        if func is torch.Tensor.zero_ and result.is_meta:
            zero = torch.zeros((), dtype=result.dtype, device="cpu")
            self._values[place(result)] = result, zero.expand(result.shape)
        return result


# What code reads of a meta tensor; control flow that depends on it takes either branch.
_READ = {
    torch.Tensor.item: 0,
    torch.Tensor.__bool__: False,
    torch.Tensor.__contains__: False,
    torch.Tensor.__int__: 0,
    torch.Tensor.__index__: 0,
    torch.Tensor.__float__: 0.0,
}


def once_per_architecture(
    ask: Callable[[PreTrainedModel], bool],
) -> Callable[[PreTrainedModel], bool]:
    """``ask``, whose answer follows from the class and the configuration of a model alone, asked
    once for each. A run opens its model twice: on the meta device, to find mistakes early, and on
    its own."""
    known: dict[tuple[object, ...], bool] = {}

    @wraps(ask)
    def answer(model: PreTrainedModel) -> bool:
        config = model.config
        described = json.dumps(
            config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str
        )
        key = (type(model), config._attn_implementation, described)
        if key not in known:
            known[key] = ask(model)
        return known[key]

    return answer


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """While it lasts, all tensors of ``model`` are on the meta device, tied ones tied. Afterwards
    its own are back, also where its code has put others in their place."""
    kept = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    made: dict[int, torch.Tensor] = {}

    def blank(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            # one type for all: grouped products of experts have no other there
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_like(tensor, device="meta", dtype=dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    try:
        for module, own, parameters, buffers in kept:
            for name, parameter in parameters.items():
                module._parameters[name] = None if parameter is None else blank(parameter)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else blank(buffer)
            vars(module).update({n: blank(t) for n, t in own.items() if type(t) is torch.Tensor})
        with _Readable():
            yield
    finally:
        for module, own, parameters, buffers in kept:
            _restore(vars(module), own)
            _restore(module._parameters, parameters)
            _restore(module._buffers, buffers)


def _restore(changed: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in changed.keys() - before.keys():
        del changed[name]
    changed.update(before)


class _Readable(TorchFunctionMode):
    """Numbers that are read from meta tensors are 0."""

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READ and args[0].device.type == "meta":
            return _READ[func]
        return func(*args, **(kwargs or {}))
