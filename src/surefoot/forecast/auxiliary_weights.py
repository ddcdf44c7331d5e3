"""Memory of what computes beside the policy in every window: a reference, a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..model.pretrained.loading import resolve
from ..network.heads import HEADS
from ..network.open import open_network
from ..parallel.world import ALONE
from ..recipe.recipe import Recipe
from ..run.policy import options_of
from ..training.precompute import model_of
from ..training.stage import AuxiliaryModel, auxiliary_of
from .estimate.dry_run import DryRunModel
from .estimate.fake_tensors import FakeTensors
from .estimate.memory_model import Weight


def auxiliary_size(recipe: Recipe, policy: DryRunModel, count: int, *, on_gpu: bool) -> int:
    """Bytes beside the policy's on the largest of ``count`` ranks that share all weights: those of
    other models that compute in every window and, in main memory, the initial values of what is
    trained, if the initial policy does."""
    roles = auxiliary_of(recipe.stage, "window").values()
    weights = [weight for one in roles if one.model for weight in _other(recipe, one, policy)]
    if not on_gpu and any(one.model is None for one in roles):
        weights += [
            Weight(tuple(p.shape), p.element_size(), False, None)
            for p in policy.network.named.values()
        ]
    return sum(weight.share(count) * weight.item_size for weight in weights)


def _other(recipe: Recipe, one: AuxiliaryModel, policy: DryRunModel) -> Iterator[Weight]:
    """The weights of a model of its own, as a frozen one is held."""
    model = model_of(one, recipe.model)
    options = replace(
        options_of(recipe),
        method=None,
        heads=[name for name in one.spec.outputs if name in HEADS],
        is_trainable=False,
        precision=policy.setting.precision,
    )
    tensors = FakeTensors(policy.setting)
    network = open_network(resolve(model, weights=False), model, None, ALONE, options, tensors)
    for parameter in network.module.parameters():
        yield Weight(tuple(parameter.shape), parameter.element_size(), False, None)
