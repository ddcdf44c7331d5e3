"""Parameter groups: which parameters decay, and at which learning rate each is trained.

Matrices decay; biases, norms and other vectors do not.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from ..errors import RecipeError, counted

if TYPE_CHECKING:
    from torch import nn

Named: TypeAlias = "Iterable[tuple[str, nn.Parameter]]"
Group: TypeAlias = dict[str, object]
logger = logging.getLogger(__name__)


def parameter_groups(
    named: Named,
    rate_of: Callable[[str, int], float],
    factors: Mapping[str, float],
    weight_decay: float,
) -> list[Group]:
    """Groups for a torch optimizer: parameters of one learning rate that all decay, or none of
    which does. Each also has ``names``, parallel to ``params``, so that its state can be saved by
    name. ``rate_of`` returns the learning rate of a parameter, by its name and its number of
    dimensions; ``factors`` are those of ``learning_rates``."""
    found: dict[object, Group] = {}
    for name, parameter in named:
        decay = weight_decay if parameter.ndim >= 2 else 0.0
        rate = rate_of(name, parameter.ndim) * factor_of(name, factors)
        own = {"lr": rate, "weight_decay": decay}
        group = found.setdefault((rate, parameter.ndim >= 2), {"params": [], "names": [], **own})
        group["params"].append(parameter)  # type: ignore[attr-defined]
        group["names"].append(name)  # type: ignore[attr-defined]
    # of no parameters: a learning rate, no more
    return [*found.values()] or [{"params": [], "names": [], "weight_decay": 0.0}]


def factor_of(name: str, learning_rates: Mapping[str, float]) -> float:
    """The factor of the learning rate of the parameter ``name``: that of the pattern that matches,
    otherwise 1."""
    return next((f for pattern, f in learning_rates.items() if matches(pattern, name)), 1.0)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches consecutive parts of ``name``, which dots separate."""
    wanted, parts = pattern.split("."), name.split(".")
    return any(
        all(fnmatchcase(parts[start + i], one) for i, one in enumerate(wanted))
        for start in range(len(parts) - len(wanted) + 1)
    )


def check_learning_rates(learning_rates: Mapping[str, float], names: Sequence[str]) -> None:
    """Raise ``RecipeError`` if a pattern matches none of the trainable parameters ``names``, or two
    match the same one."""
    owner: dict[str, str] = {}
    for pattern in learning_rates:
        matched = [name for name in names if matches(pattern, name)]
        if not matched:
            raise RecipeError(
                f"optim: learning_rates: {pattern!r} matches no trainable parameter"
                f"{_similar(pattern, names)}"
            )
        for name in matched:
            if name in owner:
                raise RecipeError(
                    f"optim: learning_rates: {owner[name]!r} and {pattern!r} both match {name}; "
                    "change one of them so that each parameter has one learning rate"
                )
            owner[name] = pattern


def log_learning_rates(
    rate: float, learning_rates: Mapping[str, float], names: Sequence[str]
) -> None:
    """Log which parameters have which learning rate, if they differ."""
    for pattern, factor in learning_rates.items():
        matched = [name for name in names if matches(pattern, name)]
        logger.info(
            "learning rate %g (%g x %g) for %r: %s, such as %s",
            rate * factor,
            rate,
            factor,
            pattern,
            counted(len(matched), "parameter"),
            matched[0],
        )


def _similar(pattern: str, names: Sequence[str]) -> str:
    """What to write instead of ``pattern``, for an error message."""
    known = {part for name in names for part in name.split(".") if not part.isdigit()}
    close = difflib.get_close_matches(pattern, known, n=1)
    if close:
        return f" (did you mean {close[0]}?)"
    return f"; expected a part of a name such as {names[0]}" if names else ""
