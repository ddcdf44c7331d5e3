"""The settings of an adapter whose training is continued: it is there already, so they decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lora import LoRA

_NUMBERS = {"rank": ("r", int), "dropout": ("lora_dropout", float)}
_FLAGS = {"rslora": "use_rslora", "dora": "use_dora"}


def continued(method: LoRA, adapter: Mapping[str, object]) -> LoRA:
    """``method`` as the adapter has it. Names in another order are unchanged. So are targets that
    the recipe names: other names may mean the same, which only the model can tell."""
    found: dict[str, Any] = {ours: bool(adapter.get(name)) for ours, name in _FLAGS.items()}
    for ours, (name, kind) in _NUMBERS.items():
        if isinstance(value := adapter.get(name), int | float):
            found[ours] = kind(value)
    if isinstance(alpha := adapter.get("lora_alpha"), int | float):
        is_usual = method.alpha is None and alpha == 2 * found.get("rank", method.rank)
        found["alpha"] = None if is_usual else float(alpha)
    saved = _names(adapter.get("modules_to_save"))
    if saved != set(method.modules_to_save):
        found["modules_to_save"] = tuple(sorted(saved))
    if method.targets == ("all",) and (targets := target_names(adapter)):
        found["targets"] = tuple(sorted(targets))
    return replace(method, **found)


def target_names(adapter: Mapping[str, object]) -> set[str]:
    """The targets in an adapter's configuration, by names that recipes use."""
    parameters = _names(adapter.get("target_parameters"))
    modules = _names(adapter.get("target_modules"))
    return modules | {name.removesuffix(".weight") for name in parameters}


def _names(value: object) -> set[str]:
    if isinstance(value, str):
        return {value}
    return set(map(str, value)) if isinstance(value, Iterable) else set()
