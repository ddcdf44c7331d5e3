"""A model as the stages of a pipeline: the layers of each, with the embedding before the first and
norm and head after the last.

A process keeps the modules of its own stages; where the others were, hidden states pass through. So
every name stays what it is in the whole model, and the model's own code does the rest: masks,
positions, what a kind of layer needs. A stage is run by letting only its own layers be there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..errors import RecipeError
from .anatomy import Absent, Anatomy, anatomy

_OF_THE_HEAD = ("logits_to_keep", "labels")  # arguments that the model without its head knows not


def split(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, as many in each as can be.

    Stages in the middle get the ones left over: the last one also has the head, the first the
    embedding. Raises ``RecipeError`` if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise RecipeError(
            f"parallel.pp: {num_stages} stages need as many layers, but the model has "
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


@dataclass(frozen=True)
class _Stage:
    """What lies in the places of ``base`` while one stage runs."""

    layers: nn.Module
    norm: nn.Module


@dataclass(frozen=True)
class Stages:
    """The stages of this process."""

    parts: Anatomy
    last: int  # number of the last stage of all
    here: Mapping[int, _Stage]  # by number

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Let the model be this stage: but for the last one, it ends with hidden states."""
        base, model = self.parts.base, self.parts.model
        places = {
            self.parts.layers: self.here[number].layers,
            self.parts.norm: self.here[number].norm,
        }
        whole = {name: base._modules[name] for name in places}
        own = vars(model).get("forward")
        base._modules.update(places)
        if number != self.last:
            model.forward = _without_head(base)
        try:
            yield
        finally:
            base._modules.update(whole)
            if number != self.last:
                del model.forward
                if own is not None:
                    model.forward = own


def _without_head(base: nn.Module) -> Callable[..., object]:
    def forward(*given: object, **named: object) -> object:
        return base(*given, **{k: v for k, v in named.items() if k not in _OF_THE_HEAD})

    return forward


def parameters_of(model: PreTrainedModel, num_stages: int) -> list[list[nn.Parameter]]:
    """The parameters of each stage of a whole model; one that is tied is in two.

    Raises ``RecipeError`` if the architecture cannot be cut so.
    """
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
    """Let ``model`` have the modules of the stages ``numbers`` of ``num_stages``, and no others.

    Raises ``RecipeError`` if the architecture cannot be cut so.
    """
    parts = anatomy(model)
    runs, last = split(parts.num_layers, num_stages), num_stages - 1
    base = parts.base._modules
    layers = list(parts.base.get_submodule(parts.layers).children())
    absent = [Absent(layer) for layer in layers]
    norm = parts.base.get_submodule(parts.norm)
    no_norm = Absent(norm)

    def only(wanted: Collection[int]) -> nn.ModuleList:
        kept = {i for number in wanted for i in runs[number]}
        return nn.ModuleList([layers[i] if i in kept else absent[i] for i in range(len(layers))])

    base[parts.layers] = only(numbers)
    if 0 not in numbers:
        base[parts.embedding] = None
    if last not in numbers:
        base[parts.norm], model._modules[parts.head] = no_norm, None
    here = {n: _Stage(only([n]), norm if n == last else no_norm) for n in numbers}
    return Stages(parts, last, here)
