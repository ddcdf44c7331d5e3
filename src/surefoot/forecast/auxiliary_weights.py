"""Memory of what computes beside the policy in every window without weights of its own."""

from __future__ import annotations

from .estimate.dry_run import DryRunModel
from .estimate.memory_model import Weight


def initial_values_size(policy: DryRunModel, count: int) -> int:
    """Bytes on the largest of ``count`` ranks that share all weights: the initial values of what is
    trained, which are kept in main memory if windows are prepared with them."""
    if not policy.keeps_first:
        return 0
    named = policy.network.named.values()
    weights = [Weight(tuple(p.shape), p.element_size(), False, None) for p in named]
    return sum(weight.share(count) * weight.item_size for weight in weights)
