"""A run's model without weights: the names of its parameters, and which are trainable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..model.section import ModelSection
from ..network.draft import NetworkOptions
from ..network.method import Method
from ..network.network import Network
from ..network.open import open_network
from ..network.tensors import MetaTensors
from ..parallel.world import ALONE


def open_skeleton(
    folder: Path, adapter: Path | None, section: ModelSection, method: Method
) -> Network:
    """A run's network on the meta device, from ``config.json`` in ``folder`` and, if the run trains
    one, the configuration of its ``adapter``."""
    plain = replace(section, adapter=adapter, gradient_checkpointing="none")
    return open_network(folder, plain, None, ALONE, NetworkOptions(method=method), MetaTensors())


def optimizer_names(network: Network) -> dict[str, str]:
    """The trainable parameters' names in the model -> in the optimizer's state."""
    in_files = {id(parameter): name for name, parameter in network.named.items()}
    return {
        name: in_files[id(parameter)]
        for name, parameter in network.module.named_parameters()
        if parameter.requires_grad
    }
