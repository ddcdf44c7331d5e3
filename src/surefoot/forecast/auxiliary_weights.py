"""Memory of what computes beside the policy in every window, on weights of its own or not."""

from __future__ import annotations

from ..recipe.recipe import Recipe
from ..run.networks.auxiliary_networks import needs_start
from .estimate.dry_run import DryRunModel
from .estimate.memory_model import Weight


def initial_values_size(recipe: Recipe, policy: DryRunModel, count: int) -> int:
    """Bytes on the largest of ``count`` ranks that share all weights: the initial values of what is
    trained, which are kept in main memory if windows are prepared with them."""
    if not needs_start(recipe):
        return 0
    named = policy.network.named.values()
    weights = [Weight(tuple(p.shape), p.element_size(), False, None) for p in named]
    return sum(weight.share(count) * weight.item_size for weight in weights)
