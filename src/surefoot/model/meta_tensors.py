"""Run a model's code on the meta device: what it does with tensors, whatever they contain.

Whether a model has memory or is on the meta device, meta tensors take the place of its own
meanwhile. So the answer is the same in a first start and in a resumed one, and nothing
that the model's code does to itself stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

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
