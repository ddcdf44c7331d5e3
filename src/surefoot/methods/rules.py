"""What methods share, to be assigned or called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from .. import model as models
from ..errors import RecipeError
from ..model.section import ModelSection
from ..optim.blocks import ParameterNames, TrainedBlocks, everything
from ..schema import Problem

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..network.method import UnshardedWeights

M = TypeVar("M")


def every_name(_self: object, names: ParameterNames, _seed: int) -> TrainedBlocks:
    """All that ``apply`` has left trainable, at every step."""
    return everything(names)


def all_weights(_self: object, _module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
    """All weights of the model, frozen ones included."""
    return models.FullWeights(inner)


def unchanged(self: M, _adapter: Mapping[str, object]) -> M:
    """For methods that train no adapter, and refuse one: see ``problems_of_own_weights``."""
    return self


def attach_any(
    _self: object, model: PreTrainedModel, attach: Callable[[PreTrainedModel], nn.Module]
) -> nn.Module:
    """Likewise."""
    return attach(model)


def check_saved(method: str, model: nn.Module, names: Sequence[str]) -> None:
    """Raise ``RecipeError`` if a module that ``method`` trains in full beside its adapter does not
    exist."""
    known = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    for name in names:
        if name not in known:
            raise RecipeError(f"method.{method}.modules_to_save: no module {name!r} in the model")


def problems_of_adapters(name: str, model: ModelSection) -> Iterator[Problem]:
    """The problems of method ``name``: a base that stays frozen may be quantized, and an adapter
    continued; but float8 is for weights that are trained."""
    if model.float8 is not None:
        yield Problem(
            ("model", "float8"),
            f"method {name} trains no linear layer of the model; use method: full or freeze, or "
            "leave it unset",
        )


def problems_of_own_weights(name: str, model: ModelSection) -> Iterator[Problem]:
    """The problems of method ``name`` with an adapter, and with quantized or float16 weights."""
    if model.adapter is not None:
        yield Problem(
            ("model", "adapter"),
            f"method {name} does not train adapters; use method: lora, "
            "or merge it into the model first with `surefoot export`",
        )
    if model.frozen_adapters:
        yield Problem(
            ("model", "frozen_adapters"),
            f"method {name} trains the weights themselves; use method: lora, "
            "or merge them into the model first with `surefoot export`",
        )
    if model.quantization_bit is not None:
        yield Problem(
            ("model", "quantization_bit"),
            f"method {name} trains the weights themselves; use method: lora, or leave it unset",
        )
    if model.dtype == "float16":  # in which the optimizer's epsilon is 0 and small updates vanish
        yield Problem(
            ("model", "dtype"),
            "trainable weights cannot be float16; use auto (and train.precision: fp16)",
        )
