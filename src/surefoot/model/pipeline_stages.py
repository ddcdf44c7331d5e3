"""Split a model into pipeline stages: the layers of each, with the embedding before the first and
norm and head after the last.

A rank keeps the modules of its own stages; identity stubs replace the others. So every name is that
of the full model, and the model's own code does the rest: masks, positions, inputs of each kind of
layer. To run a stage, only its own layers are made visible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..errors import RecipeError
from .architecture import Architecture, IdentityStub, anatomy

_OF_THE_HEAD = ("logits_to_keep", "labels")  # arguments that the model without its head knows not


def split(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage, divided as evenly as possible.

    Stages in the middle get the remaining ones, because the last also has the head, and the first
    the embedding. Raises ``RecipeError`` if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise RecipeError(
            f"parallel.pp: {num_stages} pipeline stages need as many layers, but the model has "
            f"{num_layers}; lower pp or pp_stages_per_rank"
        )
    each, over = divmod(num_layers, num_stages)
    longer = [*range(1, num_stages - 1), 0, num_stages - 1][:over]
    found, start = [], 0
    for stage in range(num_stages):
        stop = start + each + (stage in longer)
        found.append(range(start, stop))
        start = stop
    return found


class Layers(nn.ModuleList):
    """The layers of this rank, of which the model's code sees one stage at a time.

    All of them stay registered, so that every module is found under its name.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__(layers)
        self.shown = list(layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.shown)

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:  # type: ignore[override]
        return self.shown[index]


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of this rank."""

    parts: Architecture
    last: int  # number of the last stage of all
    here: Mapping[int, list[nn.Module]]  # by number, the layers to show while it runs
    no_norm: nn.Module

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Make the model this stage: unless it is the last, it returns hidden states."""
        base, model = self.parts.base, self.parts.model
        layers = base.get_submodule(self.parts.layers)
        assert isinstance(layers, Layers)
        whole, layers.shown = layers.shown, self.here[number]
        norm, own = base._modules[self.parts.norm], vars(model).get("forward")
        if number != self.last:
            base._modules[self.parts.norm] = self.no_norm
            model.forward = _without_head(base)
        try:
            yield
        finally:
            layers.shown, base._modules[self.parts.norm] = whole, norm
            if number != self.last:
                del model.forward
                if own is not None:
                    model.forward = own


def _without_head(base: nn.Module) -> Callable[..., object]:
    def forward(*given: object, **named: object) -> object:
        return base(*given, **{k: v for k, v in named.items() if k not in _OF_THE_HEAD})

    return forward


def parameters_of(model: PreTrainedModel, num_stages: int) -> list[list[nn.Parameter]]:
    """The parameters of each pipeline stage of a full model; a tied one is in two. Raises
    ``RecipeError`` if the architecture cannot be split."""
    parts = anatomy(model)
    layers = list(parts.base.get_submodule(parts.layers).children())
    found = [
        [p for i in run for p in layers[i].parameters()] for run in split(len(layers), num_stages)
    ]
    found[0] += parts.base.get_submodule(parts.embedding).parameters()
    found[-1] += parts.base.get_submodule(parts.norm).parameters()
    found[-1] += model.get_submodule(parts.head).parameters()
    return found


def keep(model: PreTrainedModel, numbers: Collection[int], num_stages: int) -> Stages:
    """Keep only the modules of the pipeline stages ``numbers`` of ``num_stages`` in ``model``.
    Raises ``RecipeError`` if the architecture cannot be split."""
    parts = anatomy(model)
    runs, last = split(parts.num_layers, num_stages), num_stages - 1
    base = parts.base._modules
    layers = list(parts.base.get_submodule(parts.layers).children())
    absent = [IdentityStub(layer) for layer in layers]
    no_norm = IdentityStub(parts.base.get_submodule(parts.norm))

    def only(wanted: Collection[int]) -> list[nn.Module]:
        kept = {i for number in wanted for i in runs[number]}
        return [layers[i] if i in kept else absent[i] for i in range(len(layers))]

    base[parts.layers] = Layers(only(numbers))
    if 0 not in numbers:
        base[parts.embedding] = None
    if last not in numbers:
        base[parts.norm], model._modules[parts.head] = no_norm, None
    return Stages(parts, last, {number: only([number]) for number in numbers}, no_norm)
