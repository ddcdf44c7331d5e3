"""Rewards that are Python functions of the user: found by file and name, called, and checked."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from ..errors import RunError, counted
from ..schema.locations import FunctionPath
from ..storage import files

RewardFunction = Callable[..., Sequence[float | None]]


def scores(
    reward: FunctionPath,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[object]],
) -> list[float | None]:
    """``reward(prompts=…, completions=…, column=…, …)`` of all completions together, as TRL calls
    it. A function that takes no ``**kwargs`` gets the columns that it names. Raises ``RunError`` if
    it fails, or gives other than a number or None per completion."""
    function = load_function(reward)
    given = {"prompts": prompts, "completions": completions, **columns}
    parameters = inspect.signature(function).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        named = {one.name for one in parameters}
        given = {name: values for name, values in given.items() if name in named}
    try:
        found = list(function(**given))
    except Exception as error:
        raise RunError(f"{reward}: {type(error).__name__}: {error}") from error
    if len(found) != len(completions):
        rewards = counted(len(found), "reward")
        raise RunError(f"{reward}: gave {rewards} for {counted(len(completions), 'completion')}")
    return [_checked(reward, value) for value in found]


def _checked(reward: FunctionPath, value: object) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RunError(f"{reward}: expected a finite number or None for a reward, got {value!r}")
    return number


@cache
def load_function(path: FunctionPath) -> RewardFunction:
    """The function at ``path``, whose file is run once. Raises ``RunError``."""
    spec = importlib.util.spec_from_file_location(f"_reward_{path.file.stem}", path.file)
    if spec is None or spec.loader is None or files.size_of(path.file) is None:
        raise RunError(f"{path}: there is no Python file {path.file}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: RewardFunction = vars(module)[path.name]
    except KeyError:
        raise RunError(f"{path}: {path.file} defines no {path.name}") from None
    except Exception as error:
        raise RunError(f"{path}: {type(error).__name__}: {error}") from error
    return function
