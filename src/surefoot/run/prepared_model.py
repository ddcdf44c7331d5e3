"""How the model of a run was made ready, recorded in its state and compared at a resume.

A resumed model takes another path to the same values: without files, or with other ranks. What
decides how it computes beside the values must be equal on the same kind of machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import nn

from ..model.lora_targets import is_added
from ..model.pretrained.loading import device
from ..network.network import Network
from ..training.state import Kernels

logger = logging.getLogger(__name__)
MACHINE = "machine"  # of two kinds of machines, nothing is compared


def compare_prepared(kernels: Kernels, network: Network) -> None:
    """Record how ``network`` was made ready. Logs what differs from the record of a run that is
    resumed on the same kind of machine."""
    now, before = prepared(network), kernels.prepared or {}
    kernels.prepared = now
    if before.get(MACHINE) != now[MACHINE]:
        return
    different = [name for name in now if before.get(name, now[name]) != now[name]]
    if different:
        changes = "; ".join(f"{name}: {before[name]}, now {now[name]}" for name in different)
        logger.warning(
            "the model is not prepared as when this run was saved, so losses may differ: %s",
            changes,
        )


def prepared(network: Network) -> dict[str, str]:
    """What decides how a network computes, by a name for people."""
    world, module = network.world, network.module
    head = network.engine.runner.head
    dtypes = sorted({f"{p.dtype}".removeprefix("torch.") for p in module.parameters()})
    return {
        MACHINE: f"{device().type}, tp {world.tp}, pp {world.pp}, ranks {world.size}",
        "attention kernel": str(network.inner.config._attn_implementation),
        "output head": "logits" if head is None else "log-probabilities in chunks",
        "precision": network.options.precision,
        "dtypes of weights": ", ".join(dtypes),
        "hash of buffers": _hash(dict(_buffers(module))),
    }


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that no checkpoint contains."""
    for prefix, part in module.named_modules():
        for name in sorted(part._non_persistent_buffers_set):
            if is_added(f"{prefix}.{name}"):  # PEFT's copy of the embeddings that it replaces
                continue
            if (values := part._buffers.get(name)) is not None:
                yield f"{prefix}.{name}", values


def _hash(buffers: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name, values in sorted(buffers.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        data = values.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()
