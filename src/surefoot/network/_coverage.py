"""Which weights of a model are trained, which are not and why, as shares of all weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..model.config import num_elements
from ..model.parts import parts_of
from ..model.weight_matrices import (
    ROUTER,
    adapted,
    is_added,
    matrices,
    plain_name,
    router_names,
    unreached_by_text,
)

BY_PICTURES = ", by rows with more than text"
ADAPTER, FULL, IN_TURN = "yes, by an adapter", "yes", "yes, in turn"
NEW_TOKENS, NO_ADAPTER = "rows of new tokens", "its part has no adapter"
_VECTORS = "norms, biases and other vectors"
_NUMBERED = re.compile(r"^(?:.*?\.)?\d+\.")  # up to the number of a layer


@dataclass(frozen=True)
class CoverageRow:
    """Weights of the same modules in all layers that are all trained, or for one reason are not."""

    modules: str
    share: float  # of all weights
    trained: str
    part: str = ""  # of a model that reads pictures


def coverage(
    model: nn.Module, inner: PreTrainedModel, in_turn: Collection[str] = ()
) -> list[CoverageRow]:
    """The weights of ``inner``, in its order, the adapter in ``model`` not counted. Only some steps
    train the parameters ``in_turn``, by their names in ``model``."""
    alternates = {p for name, p in model.named_parameters() if name in in_turn}
    layers = adapted(model) if model is not inner else {}
    updated = {name for name, layer in layers.items() if _has_trained(layer)}
    why, unreached = _reasons(inner, has_adapter=bool(layers)), unreached_by_text(inner)
    by_parameter = {p: part for part, inside in parts_of(inner).items() for p in inside}
    parts = {plain_name(name): by_parameter.get(p, "") for name, p in inner.named_parameters()}
    adapted_parts = {parts.get(name) for name in updated}
    sizes: dict[tuple[str, str, str], dict[str, int]] = {}
    for wrapped, parameter in inner.named_parameters():
        if is_added(wrapped):
            continue
        name = plain_name(wrapped)
        # PEFT freezes the original of a module that it trains in full
        # (`modules_to_save`), as a copy beside it.
        is_full = parameter.requires_grad or ".original_module." in wrapped
        full = IN_TURN if parameter in alternates else FULL
        reason = why[name] if not updated or parts[name] in adapted_parts else NO_ADAPTER
        trained = ADAPTER if name in updated else full if is_full else f"no: {reason}"
        if ".token_adapter." in wrapped:
            trained = NEW_TOKENS
        if name in unreached and trained.startswith("yes"):
            trained += BY_PICTURES
        place, leaf = _place(name, parameter)
        group = sizes.setdefault((parts[name], place, trained), {})
        group[leaf] = group.get(leaf, 0) + num_elements(parameter)
    total = sum(sum(group.values()) for group in sizes.values())
    return [
        CoverageRow(_label(place, list(group)), sum(group.values()) / total, trained, part)
        for (part, place, trained), group in sizes.items()
    ]


def table(rows: Sequence[CoverageRow]) -> str:
    """``rows`` as aligned text, a line each below a head."""
    lines = [("modules", "of all weights", "trained")]
    for row in rows:
        modules = f"{row.part}: {row.modules}" if row.part else row.modules
        lines.append((modules, f"{100 * row.share:.2f} %", row.trained))
    first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    return "\n".join(f"  {a:<{first}}  {b:>{second}}  {c}" for a, b, c in lines)


def _has_trained(layer: nn.Module) -> bool:
    """Whether PEFT's ``layer`` has an adapter that is trained, not frozen ones only."""
    adapter_parameters = (
        p for name, p in layer.named_parameters() if not name.startswith("base_layer.")
    )
    return any(parameter.requires_grad for parameter in adapter_parameters)


def _place(name: str, parameter: nn.Parameter) -> tuple[str, str]:
    """The module around a weight, without the number of its layer, and its own name there."""
    if parameter.ndim < 2:
        return _VECTORS, ""
    inside = _NUMBERED.sub("", name.removesuffix(".weight"))
    inside = re.sub(r"\.\d+(?=\.|$)", ".*", inside)
    place, _, leaf = inside.rpartition(".")
    return (place, leaf) if inside != name.removesuffix(".weight") else ("", leaf)


def _label(place: str, leaves: Sequence[str]) -> str:
    if leaves == [""]:
        return place
    return f"{place}: {', '.join(leaves)}" if place else ", ".join(leaves)


def _reasons(inner: PreTrainedModel, *, has_adapter: bool) -> Mapping[str, str]:
    """Why each weight would be frozen."""
    left_out = {matrix.name: matrix.left_out for matrix in matrices(inner)}
    modules = {plain_name(n): m for n, m in inner.named_modules() if not is_added(n)}
    embeddings = {f"{name}.weight" for name, m in modules.items() if isinstance(m, nn.Embedding)}
    routers, reasons = router_names(inner), {}
    for wrapped, parameter in inner.named_parameters():
        name = plain_name(wrapped)
        if not has_adapter:
            reasons[name] = "not chosen"
        elif name in left_out:
            reasons[name] = left_out[name] or "not among the targets"
        elif name in embeddings:
            reasons[name] = "an embedding"
        elif name.rpartition(".")[0] in routers:
            reasons[name] = ROUTER
        else:
            reasons[name] = "not a matrix" if parameter.ndim < 2 else "not a linear map"
    return reasons
