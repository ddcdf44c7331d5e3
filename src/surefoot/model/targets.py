"""Find modules in a model by what they are: its decoder layers, its linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


@runtime_checkable
class HasHead(Protocol):
    """A ``PreTrainedModel``, without importing it: recipes name methods, which import this module,
    and a recipe is read without transformers and torch."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The output head."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order: the elements of the ``ModuleList`` with most parameters. They
    may be of several classes, as in hybrids of attention and state space models."""
    from torch import nn

    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise ModelError(
            f"{type(model).__name__}: found no list of layers; use method full or lora"
        )
    largest: nn.ModuleList = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))
    return list(largest)


def children(layer: nn.Module) -> dict[str, list[nn.Module]]:
    """Every submodule of ``layer`` under the last part of its name (``mlp``, ``q_proj``, ...)."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in layer.named_modules():
        if name:
            found.setdefault(name.rsplit(".", 1)[-1], []).append(module)
    return found


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of all linear layers except the output head, sorted."""
    from torch import nn

    head = model.get_output_embeddings() if isinstance(model, HasHead) else None
    found = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(found)


def endings(wanted: Iterable[str], every: Iterable[str]) -> list[str]:
    """The shortest endings, of whole parts, that only ``wanted`` names have among ``every``."""
    wanted = list(wanted)
    own = set(wanted)
    others = {ending for name in every if name not in own for ending in _parts(name)}
    return sorted({next((e for e in _parts(n) if e not in others), n) for n in wanted})


def _parts(name: str) -> list[str]:
    """``a.b.c`` -> ``c``, ``b.c``, ``a.b.c``."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words) - 1, -1, -1)]
