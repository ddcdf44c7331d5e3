"""Layers that carry a state along the row (recurrences, convolutions), computed document by
document in packed rows.

Such a layer is causal, so a document at the start of a row of its own, with anything behind it, has
the values that it has alone. A wrapped module gets the documents of the row as the rows of one or a
few padded batches, of similar lengths each, and its results are put back. Documents that share a
prompt each have it in their row.

``separate_mixers`` finds the modules by trying, without names: two passes over a row whose first
document differs. A module leaks if what it returns for later documents differs while what it gets
for them does not. The smallest ones that leak are wrapped, and all of their class. If the module
around them leaks then, it is wrapped in their place.

Shapes: T tokens of the row, D its size, K rows and L tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .packed_attention import BoundsMissingError, DocumentBounds

_MOST_PADDING = 0.15  # of the positions of a batch: scans cost the square of its longest row
_MOST_ROUNDS = 8  # of wrapping: each finds another class, or the module around one
_ROW = "packed_row"  # an attribute of models with wrapped modules


class PackedRow:
    """The documents of the row that a model computes at present; None: it is not packed."""

    def __init__(self) -> None:
        self.bounds: DocumentBounds | None = None

    def noted(self, forward: Callable[..., object]) -> Callable[..., object]:
        """``forward`` of the model, which knows its documents from here on."""

        @wraps(forward)
        def run(*args: object, **kwargs: object) -> object:
            bounds = kwargs.get("document_bounds")
            self.bounds = bounds if isinstance(bounds, DocumentBounds) else None
            return forward(*args, **kwargs)

        return run

    @contextmanager
    def again(self, bounds: DocumentBounds | None) -> Iterator[None]:
        """A layer of a pass with these bounds, while another row may have been computed since."""
        now, self.bounds = self.bounds, bounds
        try:
            yield
        finally:
            self.bounds = now


def row_of(model: PreTrainedModel) -> PackedRow:
    """The row of ``model``, which its forward passes note from now on."""
    row: PackedRow | None = vars(model).get(_ROW)
    if row is None:
        row = vars(model)[_ROW] = PackedRow()
        model.forward = row.noted(model.forward)  # no hook: PEFT calls ``forward``, past all hooks
    return row


def follow_recomputation(model: PreTrainedModel) -> None:
    """Let each layer of ``model`` be recomputed with the documents of its own forward pass, while
    other rows may have been computed since."""
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            _follow(row_of(model), layer)


def _follow(row: PackedRow, layer: nn.Module) -> None:
    recomputed: Callable[..., object] = layer._gradient_checkpointing_func  # type: ignore[assignment]

    def run(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        bounds = row.bounds

        def computed(*inputs: object, **options: object) -> object:
            with row.again(bounds):
                return function(*inputs, **options)

        return recomputed(computed, *args, **kwargs)

    layer._gradient_checkpointing_func = run  # type: ignore[assignment]


def separate_mixers(model: PreTrainedModel, run: Callable[[int], object], cut: int) -> list[str]:
    """Wrap what leaks in ``model``; the names of these modules. ``run`` computes a packed row whose
    first document, of ``cut`` tokens, begins with a given token. A collective call on a mesh."""
    for _ in range(_MOST_ROUNDS):
        leaking = _leaking(model, run, cut)
        if not leaking:
            break
        kinds = {(type(module), _wrapped(module)) for module in leaking}
        for module in list(model.modules()):
            if (type(module), False) in kinds and not _wrapped(module):
                _wrap(module, row_of(model))
        if all(is_wrapped for _, is_wrapped in kinds):
            break  # documents see each other in another way
    return [name for name, module in model.named_modules() if _wrapped(module)]


def has_mixers(model: PreTrainedModel) -> bool:
    """Whether layers of ``model`` compute each document by itself."""
    return any(map(_wrapped, model.modules()))


def join_mixers(model: PreTrainedModel) -> None:
    """Undo ``separate_mixers``."""
    for module in model.modules():
        _unwrap(module)


def _leaking(model: PreTrainedModel, run: Callable[[int], object], cut: int) -> list[nn.Module]:
    """The smallest modules by which later documents see the first one."""
    passes = list[dict[nn.Module, tuple[torch.Tensor, torch.Tensor]]]()
    row = row_of(model)

    def record(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        length = 0 if row.bounds is None else row.bounds.values[-1]
        hidden, result = (
            _hidden([*args, *kwargs.values()], length),
            _hidden([_first(output)], length),
        )
        if hidden is not None and result is not None:
            passes[-1].setdefault(module, (hidden[:, cut:].clone(), result[:, cut:].clone()))

    modules = [module for module in model.modules() if module is not model]
    handles = [m.register_forward_hook(record, with_kwargs=True) for m in modules]
    try:
        for start in (0, model.config.get_text_config().vocab_size // 2):
            passes.append({})
            run(start)
    finally:
        for handle in handles:
            handle.remove()
    before, after = passes
    leaking = [
        module
        for module, (hidden, result) in before.items()
        if module in after
        and not _differ(hidden, after[module][0])
        and _differ(result, after[module][1])
    ]
    around = {id(outer) for inner in leaking for outer in leaking if _is_inside(inner, outer)}
    return [module for module in leaking if id(module) not in around or _wrapped(module)]


def _is_inside(inner: nn.Module, outer: nn.Module) -> bool:
    return inner is not outer and any(module is inner for module in outer.modules())


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By more than sums in another order do."""
    share = min(32 * torch.finfo(one.dtype).eps, 0.03)
    return float((one - other).abs().max()) > share * float(one.abs().max())


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _hidden(values: Sequence[Any], length: int) -> torch.Tensor | None:
    """The first of ``values`` that is the hidden states of a row, [1, T, D]."""
    for value in values:
        is_row = isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point()
        if is_row and value.shape[:2] == (1, length):
            row: torch.Tensor = value
            return row
    return None


def _wrapped(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _by_document


def _wrap(module: nn.Module, row: PackedRow) -> None:
    for inside in module.modules():
        _unwrap(inside)
    module.forward = partial(_by_document, row, module.forward)


def _unwrap(module: nn.Module) -> None:
    if _wrapped(module):
        forward: Any = module.forward.args[1]  # type: ignore[attr-defined]
        del module.forward
        if getattr(forward, "__func__", None) is not type(module).forward:
            module.forward = forward


@torch.compiler.disable  # type: ignore[untyped-decorator]  # rows have any number of documents
def _by_document(row: PackedRow, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``forward`` returns for each document of the row alone."""
    bounds = row.bounds
    if bounds is None or (len(bounds.documents) == 1 and not any(bounds.documents[0][2:])):
        return forward(*args, **kwargs)
    length = bounds.values[-1]
    hidden = _hidden([*args, *kwargs.values()], length)
    if hidden is None:
        raise BoundsMissingError(
            "data.packing: a layer with a state was called with other tokens than those of the "
            "row; set data.packing: false"
        )
    layout = bounds.memoized(f"layout on {hidden.device}", lambda: _Layout(bounds, hidden.device))
    results, rest = list[torch.Tensor](), list[Any]()
    for rows_KL in layout.batches:

        def taken(value: Any, rows_KL: torch.Tensor = rows_KL) -> Any:
            """``value`` of these tokens, if it is of the tokens of the row; in tuples, too."""
            if isinstance(value, (tuple, list)):
                return type(value)(map(taken, value))
            is_row = isinstance(value, torch.Tensor) and value.shape[:2] == (1, length)
            return value[0][rows_KL] if is_row else value

        output = forward(*map(taken, args), **{name: taken(v) for name, v in kwargs.items()})
        if isinstance(output, tuple):
            output, *rest = output
        results.append(output.flatten(0, 1))
    result = torch.cat(results)[layout.place_T][None]
    return (result, *rest) if rest else result


class _Layout:
    """The tokens of a row in the batches of its documents: ``batches`` [K, L] are positions in the
    row, behind a document any of it; ``place_T`` is where each token is in all of them."""

    def __init__(self, bounds: DocumentBounds, device: torch.device) -> None:
        sequences = list(_sequences(bounds))
        place_T, self.batches, offset = torch.full((bounds.values[-1],), -1), [], 0
        for members in _batches([len(sequence) for sequence in sequences]):
            longest = len(sequences[members[0]])
            rows_KL = torch.zeros(len(members), longest, dtype=torch.int64)
            for row, member in enumerate(members):
                positions = sequences[member]
                rows_KL[row] = positions[-1]
                rows_KL[row, : len(positions)] = positions
                places = offset + row * longest + torch.arange(len(positions))
                is_new = place_T[positions] < 0  # of a shared prompt, one is as good as another
                place_T[positions[is_new]] = places[is_new]
            self.batches.append(rows_KL.to(device, non_blocking=True))
            offset += rows_KL.numel()
        self.place_T = place_T.to(device, non_blocking=True)


def _sequences(bounds: DocumentBounds) -> Iterator[torch.Tensor]:
    """The positions of each causal sequence in the row: a prompt and one response to it."""
    start = 0
    for prompt, first, *later in bounds.documents:
        end = start + prompt
        for length in (first, *filter(None, later)):
            yield torch.cat([torch.arange(start, start + prompt), torch.arange(end, end + length)])
            end += length
        start = end


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences of similar lengths together, the longest first in each batch."""
    batches, total = list[list[int]](), 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        total += lengths[index]
        if batches:
            positions = lengths[batches[-1][0]] * (len(batches[-1]) + 1)
            if positions - total <= _MOST_PADDING * positions:
                batches[-1].append(index)
                continue
        batches.append([index])
        total = lengths[index]
    return batches
