"""The steps of ``open_network`` for layers: the start of adapters, how layers are computed, what
they keep for the backward pass, and the proof that new ones change nothing."""

from __future__ import annotations

import logging

import torch

from ..batch import Batch, OutputSpec
from ..errors import RecipeError, counted
from ..model.adapters.dora import enable_float32_lengths
from ..model.expansion.verification import verify_new_layers
from ..model.fused_lora import enable_fused_lora
from ..model.pretrained.compiled import compile_layers
from ..model.pretrained.float8 import use_float8
from ..model.pretrained.loading import device
from ..model.pretrained.recomputation import recompute_activations
from ..parallel.sharded_model import layers
from .adapters.initial_values import set_initial_values
from .draft import Draft
from .network import Network
from .tensors import Tensors

logger = logging.getLogger(__name__)


def initialize_adapter(draft: Draft, tensors: Tensors) -> None:
    """Give an adapter values that follow from the weights, unless a checkpoint has its values."""
    if tensors.have_values and draft.options.is_new:
        set_initial_values(draft)


def fuse_lora(draft: Draft, _: Tensors) -> None:
    """Compute each linear map that has an adapter in one autograd function."""
    is_run = draft.options.method is not None or draft.world.tp > 1  # which cuts modules alone
    if draft.module is not draft.inner and is_run:
        enable_fused_lora(draft.module)
    if draft.module is not draft.inner:
        enable_float32_lengths(draft.module)


def recompute(draft: Draft, tensors: Tensors) -> None:
    """Recompute activations in the backward pass. Raises ``RecipeError`` if the policy does not go
    with the method."""
    policy = draft.section.gradient_checkpointing
    if not draft.options.is_trainable:
        return
    if policy == "selective" and draft.module is not draft.inner:
        raise RecipeError(
            "model.gradient_checkpointing: selective would keep products to which an adapter adds "
            "its own in place; set it to full, or to none"
        )
    recompute_activations(draft.inner, policy, keep_random=tensors.have_values)


def compute_in_float8(draft: Draft, tensors: Tensors) -> None:
    """Multiply what the method trains in float8, in a frozen copy as in the trained model."""
    if draft.section.float8 is not None and draft.options.method is not None:
        emulate = tensors.emulates_float8
        count = use_float8(layers(draft.module), draft.section.float8, emulate=emulate)
        logger.info("float8: %s", counted(count, "linear layer"))


def compile_forward(draft: Draft, tensors: Tensors) -> None:
    """Compile each layer's forward pass."""
    if draft.section.compile and tensors.have_values:
        compile_layers(layers(draft.module))


def verify_added_layers(network: Network) -> None:
    """Prove that layers which the method has added change nothing yet. A collective call. Raises
    ``RecipeError``."""

    def run(batch: Batch) -> torch.Tensor:
        found = network.forward(batch.to(device()), OutputSpec(("logps",))).logps
        assert found is not None
        return found

    with network.evaluating():
        is_packed, agreed = network.options.packing, network.world.first_of
        verify_new_layers(network.inner, run, is_packed=is_packed, agreed=agreed)
