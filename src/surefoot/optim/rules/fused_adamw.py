"""Torch's fused AdamW on what each rank holds: its update is that of each element alone."""

from __future__ import annotations

import torch

from .sharded import local


class FusedAdamW(torch.optim.AdamW):
    """AdamW whose kernel gets local tensors; parameters and moments stay distributed ones.

    The kernel would get them anyway. But ``DTensor`` first asks how a list may be distributed, for
    each of its tensors and every placement: a second at the first step of some hundred parameters.
    """

    def _init_group(self, group, *lists):  # type: ignore[no-untyped-def]
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return found
