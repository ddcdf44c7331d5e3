"""What methods share that train some decoder layers at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..model.targets import decoder_layers

if TYPE_CHECKING:
    from torch import nn


def make_layers_trainable(model: nn.Module, *, with_rest: bool) -> nn.Module:
    """Make the decoder layers trainable, and the rest of ``model`` or not. Raises ``ModelError`` if
    there are no layers."""
    layers = decoder_layers(model)
    model.requires_grad_(with_rest)
    for layer in layers:
        layer.requires_grad_(True)
    return model


def layer_blocks(layers: Iterable[Sequence[str]]) -> dict[str, frozenset[str]]:
    """The parameters of each layer that has some, by its label."""
    numbered = enumerate(layers)
    return {f"layer {number}": frozenset(names) for number, names in numbered if names}


def drawn(count: int, seed: int, number: int) -> Sequence[int]:
    """Permutation ``number`` of the numbers below ``count``, by the hash of each: it depends on no
    library's version."""

    def key(place: int) -> bytes:
        return hashlib.blake2b(f"{seed} {number} {place}".encode()).digest()

    return sorted(range(count), key=key)
