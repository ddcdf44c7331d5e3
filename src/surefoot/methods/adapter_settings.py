"""The settings of an adapter whose training is continued, which take the place of the recipe's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_NUMBERS = {"rank": ("r", int), "dropout": ("lora_dropout", float)}
_FLAGS = {"rslora": "use_rslora", "dora": "use_dora"}


def changed_settings(
    adapter: Mapping[str, object],
    rank: int,
    alpha: float | None,
    named: Mapping[str, Collection[str]],
) -> dict[str, Any]:
    """The settings of the adapter by the names of recipes; ``rank``, ``alpha`` and ``named``
    modules are those of the recipe. Names in another order are the recipe's. So are targets that it
    names: other names may mean the same parameters, which depends on the model."""
    found: dict[str, Any] = {name: bool(adapter.get(theirs)) for name, theirs in _FLAGS.items()}
    for name, (theirs, kind) in _NUMBERS.items():
        if isinstance(value := adapter.get(theirs), int | float):
            found[name] = kind(value)
    if isinstance(scaled := adapter.get("lora_alpha"), int | float):
        is_usual = alpha is None and scaled == 2 * found.get("rank", rank)
        found["alpha"] = None if is_usual else float(scaled)
    found["new_tokens"] = bool(adapter.get("trainable_token_indices"))
    saved = _names(adapter.get("modules_to_save"))
    if saved != set(named["modules_to_save"]):
        found["modules_to_save"] = tuple(sorted(saved))
    if tuple(named["targets"]) == ("all",) and (targets := target_names(adapter)):
        found["targets"] = tuple(sorted(targets))
    return found


def patterns(adapter: Mapping[str, object]) -> dict[str, Mapping[str, Any]]:
    """Its ranks and values of alpha by pattern."""
    found = {name: adapter.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    return {name: dict(own) for name, own in found.items() if isinstance(own, Mapping)}


def matches(pattern: str, module: str) -> bool:
    """Whether PEFT applies ``pattern`` to ``module``, a full name."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def check_pattern(setting: str, pattern: str) -> None:
    """Raise ``ValueError`` if ``pattern`` is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{setting}: {pattern!r} is no regular expression: {error}") from None


def target_names(adapter: Mapping[str, object]) -> set[str]:
    """The targets in an adapter's configuration, by names that recipes use."""
    parameters = _names(adapter.get("target_parameters"))
    modules = _names(adapter.get("target_modules"))
    return modules | {name.removesuffix(".weight") for name in parameters}


def _names(value: object) -> set[str]:
    if isinstance(value, str):
        return {value}
    return set(map(str, value)) if isinstance(value, Iterable) else set()
