"""Which columns of its slot a row sees, in the form that an architecture takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

_ONE = ""  # instead of a layer type: all layers have the same mask
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LIMITS = ("window", "chunk", "local", "block")  # in names of settings that limit what is seen


@dataclass(frozen=True)
class Masks:
    """One mask for each type of layers, or one for all."""

    windows: Mapping[str, int | None]  # tokens that a query sees; None: all before it

    def at(
        self, positions_B: torch.Tensor, length: int, added_as: torch.dtype | None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, 1, length] what tokens at ``positions_B`` see, as booleans, or added to scores of
        a type."""
        columns_L = torch.arange(length, device=positions_B.device)
        seen_BL = columns_L <= positions_B[:, None]
        found = {}
        for name, window in self.windows.items():
            mask = seen_BL
            if window is not None:
                mask = seen_BL & (columns_L > positions_B[:, None] - window)
            found[name] = (mask if added_as is None else _added(mask, added_as))[:, None, None]
        return found.get(_ONE, found)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return hidden.masked_fill(~mask, torch.finfo(dtype).min)


def candidates(config: PretrainedConfig) -> Iterator[Masks]:
    """The forms that an architecture may take, to be tried in turn; none if some layers have no
    keys and values of all tokens."""
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if types - {_FULL, _SLIDING}:
        return
    if types:
        windows = {name: window if name == _SLIDING else None for name in sorted(types)}
        yield Masks(windows)
        if len(types) == 1:
            yield Masks({_ONE: next(iter(windows.values()))})
        return
    yield Masks({_ONE: window})
    if window is not None:
        yield Masks({_ONE: None})


def longest_limit(config: PretrainedConfig, longest: int) -> int:
    """The most tokens, below ``longest``, at which what a query sees may change by a setting: a
    window that a row of ``longest`` tokens exceeds. 0 if there is none."""
    told = config.to_dict()
    names = [name for name in told if any(part in name for part in _LIMITS)]
    found = [told[name] for name in names if isinstance(told[name], int)]
    return max((limit for limit in found if limit < longest), default=0)
