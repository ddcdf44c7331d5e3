"""Which parameters decay: matrices do; biases, norms and other vectors do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import nn

Named: TypeAlias = "Iterable[tuple[str, nn.Parameter]]"


def decay_groups(named: Named, weight_decay: float) -> list[dict[str, object]]:
    """Two parameter groups for a torch optimizer; the second, without decay, contains all vectors.
    Each also has ``names``, parallel to ``params``, so that its state can be saved by name."""
    groups: list[dict[str, object]] = []
    named = list(named)
    for decays in (True, False):
        chosen = [(name, p) for name, p in named if (p.ndim >= 2) == decays]
        if chosen:
            groups.append(
                {
                    "params": [p for _, p in chosen],
                    "names": [name for name, _ in chosen],
                    "weight_decay": weight_decay if decays else 0.0,
                }
            )
    return groups or [{"params": [], "names": [], "weight_decay": 0.0}]  # learning rate, no more
