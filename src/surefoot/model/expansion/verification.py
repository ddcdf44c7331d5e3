"""The proof that new layers change nothing: by running the model, however it is sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...batch import Batch
from ...errors import RecipeError, counted
from .new_layers import KEY, is_new, new_layers_of, numbers, set_number

logger = logging.getLogger(__name__)
Run = Callable[[Batch], torch.Tensor]
_LENGTH = 24  # tokens, which most numbers of ranks divide that share a sequence


@torch.no_grad()
def verify_new_layers(
    model: PreTrainedModel,
    run: Run,
    *,
    is_packed: bool,
    agreed: Callable[[str | None], str | None] = lambda problem: problem,
) -> None:
    """Raise ``RecipeError`` on every rank unless the new layers of ``model`` return their input, no
    norm follows a branch that is zero, and the other layers do not depend on their number."""
    if not any(numbers(layer) for layer in model.modules()):
        return
    batch, problems = _batch(model, is_packed=is_packed), list[str]()
    with _watched(model, problems):
        now = run(batch)
    _refuse(model, agreed(problems[0] if problems else None))
    with _as_before(model):
        is_same = torch.equal(now, run(batch))
    _refuse(
        model, agreed(None if is_same else "its layers compute differently under another number")
    )
    numbers_of_new = new_layers_of(model)
    logger.info(
        "%s: %s; they change nothing yet",
        counted(len(numbers_of_new), "new layer"),
        ", ".join(map(str, numbers_of_new)),
    )


def _refuse(model: PreTrainedModel, problem: str | None) -> None:
    if problem is not None:
        raise RecipeError(
            f"{KEY}: {type(model).__name__} gets no new layers: {problem}; use another method, "
            "such as freeze"
        )


@contextmanager
def _watched(model: nn.Module, problems: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in filter(is_new, model.modules()):
            watch = partial(_compare, problems)
            stack.enter_context(_removed(layer.register_forward_hook(watch, with_kwargs=True)))
            for module in layer.modules():
                if "norm" in type(module).__name__.lower():
                    look = partial(_look, problems)
                    stack.enter_context(_removed(module.register_forward_pre_hook(look)))
        yield


@contextmanager
def _removed(handle: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _compare(
    problems: list[str],
    layer: nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: dict[str, Any],
    output: torch.Tensor | tuple[torch.Tensor, ...],
) -> None:
    given = args[0] if args else kwargs["hidden_states"]
    found = output[0] if isinstance(output, tuple | list) else output
    if not torch.equal(_local(given), _local(found)):
        problems.append(f"a new {type(layer).__name__} does not return its input")


def _look(problems: list[str], module: nn.Module, args: tuple[object, ...]) -> None:
    """A norm behind a branch makes of the first small update a large one."""
    if args and isinstance(args[0], torch.Tensor) and not bool(_local(args[0]).any()):
        problems.append(
            f"its layers normalize what a branch adds ({type(module).__name__}), so the first step "
            "would not change a new layer a little but at once in full"
        )


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Layers have the numbers that they had before others were inserted."""
    known = [(layer, found) for layer in model.modules() if (found := numbers(layer))]
    try:
        for layer, (before, _) in known:
            set_number(layer, before)
        yield
    finally:
        for layer, (_, now) in known:
            set_number(layer, now)


def _batch(model: PreTrainedModel, *, is_packed: bool) -> Batch:
    ids = torch.arange(_LENGTH) % model.config.get_text_config().vocab_size
    mask = None if is_packed else torch.ones(1, _LENGTH, dtype=torch.int64)
    bounds = torch.tensor([0, _LENGTH], dtype=torch.int32) if is_packed else None
    return Batch(ids[None], ids[None], torch.arange(_LENGTH)[None], mask, cu_seqlens=bounds)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
