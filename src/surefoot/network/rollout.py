"""What a model that is trained needs in order to generate, and what is undone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..model.attention import packed as attention


@contextmanager
def unpacked(inner: PreTrainedModel) -> Iterator[None]:
    """An ordinary attention kernel: packed rows have no key-value cache."""
    before = inner.config._attn_implementation
    if before.startswith(attention.PREFIX):
        inner.set_attn_implementation(attention.plain_kernel(inner))
    try:
        yield
    finally:
        if inner.config._attn_implementation != before:
            inner.set_attn_implementation(before)


@contextmanager
def gathered(module: nn.Module, inner: PreTrainedModel, *, again: bool) -> Iterator[None]:
    """All weights gathered, so that ranks with other prompts need not run in step. They take the
    memory of the unsharded model meanwhile."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    # PEFT's generate runs the inner model, past the root of what is sharded. Without a pass before,
    # FSDP2 would take the first layer that runs for the root, and refuse the true one later.
    # Without a pass behind, the next backward pass would prefetch what ran last on each rank.
    is_wrapped = bool(parts) and module is not inner
    try:
        if is_wrapped:
            _run_once(module)
        yield
        if is_wrapped:
            _run_once(module)
    finally:
        for part in parts:
            part.set_reshard_after_forward(again, recurse=False)
            part.reshard()


def _run_once(module: nn.Module) -> None:
    """One token through all of the model."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(module.parameters()).device)
    module(input_ids=ids, use_cache=False)
