"""A run's model without weights: the names of its parameters, and which are trainable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..errors import CheckpointError
from ..model.adapters.frozen import TRAINED
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
    plain = replace(section, adapter=adapter, frozen_adapters=(), gradient_checkpointing="none")
    return open_network(folder, plain, None, ALONE, NetworkOptions(method=method), MetaTensors())


def optimizer_names(network: Network) -> dict[str, str]:
    """The trainable parameters' names in the model -> in the optimizer's state."""
    in_files = {id(parameter): name for name, parameter in network.named.items()}
    return {
        name: in_files[id(parameter)]
        for name, parameter in network.module.named_parameters()
        if parameter.requires_grad
    }


def refuse_frozen_adapters(checkpoint: Path, trained: Iterable[str]) -> None:
    """Raise ``CheckpointError`` if an adapter consists of others than the ``trained`` one, whose
    parameters then have their names in the model instead of those in files."""
    if any(f".{TRAINED}." in name for name in trained):
        raise CheckpointError(
            f"{checkpoint}: frozen adapters of its run (model.frozen_adapters, method.lora.init) "
            "are part of its adapter, which the Trainer would train in full; write an adapter "
            "alone with --to peft"
        )
