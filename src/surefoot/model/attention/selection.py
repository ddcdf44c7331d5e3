"""The packed-attention kernel: the first in a fixed order of preference that passes a self-check.

Kernels round differently, so a choice by timing would make the numbers of a run depend on chance.
The order is ``kernels.candidates``: on a CPU SDPA, one call per document; on a GPU varlen,
flash-attn, flex attention, then SDPA. A candidate is skipped, with its reason in the log, if it
fails on a row of the run's own shapes and type, differs from SDPA one document at a time, or, with
``train.deterministic``, does not repeat its bits. A resume keeps the kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...errors import first_line
from .bounds import Bounds
from .kernels import RowKernel, candidates, register
from .packed import PREFIX, Heads, by_document, sdpa

logger = logging.getLogger(__name__)
BY_DOCUMENT = "sdpa"


@dataclass(frozen=True)
class Row:
    """A packed row for testing kernels."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    bounds: Sequence[int]
    device: torch.device
    dtype: torch.dtype

    def inputs(self) -> list[torch.Tensor]:
        """Random queries, keys and values, [1, H, T, E] each; the same ones every time."""
        dice = torch.Generator(self.device).manual_seed(0)
        heads = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        shapes = [(1, count, self.bounds[-1], self.head_dim) for count in heads]
        options = {"device": self.device, "dtype": self.dtype}
        return [torch.randn(shape, generator=dice, **options) for shape in shapes]  # type: ignore[call-overload]


def row_of(
    model: PreTrainedModel, bounds: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Row:
    """A row of ``model`` with these documents."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return Row(
        num_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        bounds=bounds,
        device=device,
        dtype=dtype,
    )


def choose(row: Row, kernels: Mapping[str, RowKernel] | None = None) -> str:
    """The name of the first kernel in order of preference that passes the self-check on ``row``."""
    kernels = candidates(row.device) if kernels is None else kernels
    chosen = _first_correct(row, kernels) if kernels else None
    logger.info("attention kernel: %s, for rows that pack several documents", chosen or BY_DOCUMENT)
    return chosen or BY_DOCUMENT


def _first_correct(row: Row, kernels: Mapping[str, RowKernel]) -> str | None:
    expected = _found(_by_document, row)
    for name, kernel in kernels.items():
        try:
            why = _why_not(kernel, row, expected)
        except Exception as error:  # not built for this device, type or head size: next one
            why = first_line(error)
        if why is None:
            return name
        logger.info("attention kernel: %s rejected: %s", name, why)
    return None


def use(model: PreTrainedModel, name: str) -> str:
    """Let packed rows of ``model`` use the kernel ``name``. Returns the kernel that is used: SDPA,
    one call per document, where ``name`` is not available."""
    if name == BY_DOCUMENT:
        return name
    kernel = candidates(model.device).get(name)
    if kernel is None:
        logger.warning(
            "attention kernel: %s, used by the checkpoint, is not available; using %s, "
            "one call per document",
            name,
            BY_DOCUMENT,
        )
        return BY_DOCUMENT
    register(name, kernel)
    model.set_attn_implementation(PREFIX + name)
    return name


def _by_document(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    settings = {"document_bounds": bounds, "scaling": scaling}
    return by_document(sdpa)(torch.nn.Identity(), *heads, None, **settings)[0]


def _found(kernel: RowKernel, row: Row) -> list[torch.Tensor]:
    """The output of ``kernel`` for ``row``, and the gradients of its inputs."""
    inputs = [tensor.requires_grad_() for tensor in row.inputs()]
    found = kernel(inputs, Bounds(row.bounds), row.head_dim**-0.5)
    found.backward(torch.cos(found.detach()))  # type: ignore[no-untyped-call]
    return [found.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def _why_not(kernel: RowKernel, row: Row, expected: Sequence[torch.Tensor]) -> str | None:
    first, second = (_found(kernel, row) for _ in range(2))
    for name, here, there in zip(("result", "dq", "dk", "dv"), first, expected, strict=True):
        bound = 16 * torch.finfo(row.dtype).eps * float(there.abs().max())
        error = float((here.double() - there.double()).abs().max())
        if not error <= bound:
            return f"its {name} differs by {error:.2g} from that of sdpa, one call per document"
    is_same = all(map(torch.equal, first, second))
    if torch.are_deterministic_algorithms_enabled() and not is_same:
        return "its bits differ from run to run (train.deterministic)"
    return None
