"""A run's model without weights: the names of its parameters, and which are trainable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from ..model.pretrained.weights import FullWeights
from ..network.draft import NetworkOptions
from ..network.network import Network
from ..network.open import open_network
from ..network.tensors import MetaTensors
from ..parallel.world import ALONE
from ..recipe.recipe import Recipe


@dataclass(frozen=True)
class Skeleton:
    """On the meta device."""

    network: Network

    @property
    def policy(self) -> nn.Module:
        """With the adapter, if the run trains one."""
        return self.network.module

    @property
    def inner(self) -> PreTrainedModel:
        """Without it."""
        return self.network.inner

    def names(self) -> dict[str, str]:
        """The trainable parameters' names in the model -> in the optimizer's state."""
        in_files = {id(parameter): name for name, parameter in self.network.named.items()}
        return {
            name: in_files[id(parameter)]
            for name, parameter in self.policy.named_parameters()
            if parameter.requires_grad
        }

    def converted(self) -> bool:
        """Whether the weight files of this architecture contain other tensors than its modules."""
        if not isinstance(self.network.weights, FullWeights):
            return False
        tied = set(self.inner.all_tied_weights_keys)
        return set(self.inner.state_dict()) - tied != set(self.network.weights.state_dict())


def build_skeleton(model: Path, adapter: Path | None, recipe: Recipe) -> Skeleton:
    """The model of a run of ``recipe``, from its configuration alone.

    Args:
        model: the folder with ``config.json``.
        adapter: the folder with ``adapter_config.json``, if the run trains an adapter.
    """
    section = replace(recipe.model, adapter=adapter, gradient_checkpointing=False)
    options = NetworkOptions(method=recipe.method)
    return Skeleton(open_network(model, section, None, ALONE, options, MetaTensors()))
