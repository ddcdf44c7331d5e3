"""Steps of ``open_network`` for layers: the start of adapters, how adapted layers are computed, and
what layers keep for the backward pass."""

from __future__ import annotations

from ..errors import RecipeError
from ..model.adapters.dora import enable_float32_lengths
from ..model.fused_lora import enable_fused_lora
from ..model.pretrained.recomputation import recompute_activations
from .adapters.initial_values import set_initial_values
from .draft import Draft
from .tensors import Tensors


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
