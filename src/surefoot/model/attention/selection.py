"""Select the packed-attention kernel of a run: each candidate is tested once, on the run's own
shapes and device.

A candidate is rejected, and the log says why, if it fails, if its values differ from SDPA with one
call per document, or if its bits differ from run to run. So a faulty kernel on a machine does no
harm. A run keeps its selection: a resume that measured again might compute sums in another order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .kernels import RowKernel, candidates, register
from .packed import PREFIX, Bounds, by_document, sdpa

logger = logging.getLogger(__name__)
BY_DOCUMENT = "sdpa"
ROUNDS = 5
_GAIN = 1.05  # times as fast; what is less may be chance
Run = Callable[[], list[torch.Tensor]]


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
    """The name of the fastest kernel that passes the self-check; logged."""
    kernels = candidates(row.device) if kernels is None else kernels
    if not kernels:
        logger.info("packed attention: %s, one call per document", BY_DOCUMENT)
        return BY_DOCUMENT
    expected, times = _found(_by_document, row), {BY_DOCUMENT: _seconds(_by_document, row)}
    for name, kernel in kernels.items():
        try:
            why = _why_not(kernel, row, expected)
            if why is None:
                times[name] = _seconds(kernel, row)
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if why is not None:
            logger.info("packed attention: %s rejected: %s", name, why)
    fastest = min(times, key=lambda name: times[name])
    chosen = fastest if times[fastest] * _GAIN < times[BY_DOCUMENT] else BY_DOCUMENT
    told = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in times.items())
    logger.info("packed attention: %s (forward and backward of one layer: %s)", chosen, told)
    return chosen


def use(model: PreTrainedModel, name: str) -> str:
    """Make packed rows of ``model`` use the kernel ``name``; returns the one in use, which is
    sdpa with one call per document if the kernel is not available.
    """
    if name == BY_DOCUMENT:
        return name
    kernel = candidates(model.device).get(name)
    if kernel is None:
        logger.warning(
            "packed attention: kernel %s, used by the checkpoint, is not available; using "
            "sdpa, one call per document",
            name,
        )
        return BY_DOCUMENT
    register(name, kernel)
    model.set_attn_implementation(PREFIX + name)
    return name


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    scaling: float | None,
) -> torch.Tensor:
    module = torch.nn.Identity()
    settings = {"document_bounds": bounds, "scaling": scaling}
    return by_document(sdpa)(module, query, key, value, None, **settings)[0]


def _found(kernel: RowKernel, row: Row) -> list[torch.Tensor]:
    """The output of ``kernel`` for ``row``, and the gradients of its inputs."""
    inputs = [tensor.requires_grad_() for tensor in row.inputs()]
    query, key, value = inputs
    found = kernel(query, key, value, Bounds(row.bounds), row.head_dim**-0.5)
    found.backward(torch.cos(found.detach()))  # type: ignore[no-untyped-call]
    return [found.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def _why_not(kernel: RowKernel, row: Row, expected: Sequence[torch.Tensor]) -> str | None:
    first, second = (_found(kernel, row) for _ in range(2))
    for name, here, there in zip(("result", "dq", "dk", "dv"), first, expected, strict=True):
        bound = 16 * torch.finfo(row.dtype).eps * float(there.abs().max())
        error = float((here.double() - there.double()).abs().max())
        if not error <= bound:
            return f"its {name} differs by {error:.2g} from that of sdpa with one call per document"
    is_same = all(map(torch.equal, first, second))
    if torch.are_deterministic_algorithms_enabled() and not is_same:
        return "its bits differ from run to run (train.deterministic)"
    return None


def _seconds(kernel: RowKernel, row: Row) -> float:
    """The fastest of several rounds, forward and backward."""
    rounds = []
    for _ in range(ROUNDS):
        _wait(row.device)
        started = time.perf_counter()
        _found(kernel, row)
        _wait(row.device)
        rounds.append(time.perf_counter() - started)
    return min(rounds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
