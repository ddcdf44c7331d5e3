"""The recipes of a sweep: a recipe, the settings that vary, and what is wrong before any starts."""

from __future__ import annotations

import itertools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Union

from ..errors import RecipeError
from ..recipe.recipe import Recipe, load, read
from ..recipe.yaml import emit
from ..schema import Setting, Unset, dotted, is_section, setting_at, settings, write
from .ranges import Choices, Range, SweptKey, as_text, parse_arguments

MAX_CHECKED = 300  # values of a setting, or combinations, that are all checked before the start
_OWN = {
    "train.output_dir": "each trial has a folder of its own; name the sweep's with --output",
    "train.cache_dir": "trials are in the folder of the sweep",
}
# A setting, and its neighbor that has precedence where it is set.
_PRECEDENCE = {"num_epochs": "max_steps", "warmup_ratio": "warmup_steps"}

Values = Mapping[str, object]  # of the settings that vary, by dotted path


@dataclass(frozen=True)
class Space:
    """The recipe of all trials, and what varies."""

    base: Recipe
    keys: tuple[SweptKey, ...]

    @property
    def size(self) -> int | None:
        """The number of combinations; None if it has no end."""
        counts = [key.values.count for key in self.keys]
        known = [count for count in counts if count is not None]
        return math.prod(known) if len(known) == len(counts) else None

    def combinations(self) -> Iterator[dict[str, object]]:
        """All of them, the last setting varying fastest."""
        names = [key.key for key in self.keys]
        for values in itertools.product(*(key.values.values() for key in self.keys)):
            yield dict(zip(names, values, strict=True))

    def recipe(self, values: Values, folder: Path) -> Recipe:
        """The recipe of a trial in ``folder``. Raises ``RecipeError`` if values contradict each
        other."""
        texts = [f"{key}={as_text(value)}" for key, value in values.items()]
        made = read(self.base, texts)
        return replace(made, train=replace(made.train, output_dir=folder))


def open_space(recipe: Path, arguments: Sequence[str]) -> Space:
    """The space of a sweep, with every key and value checked. Raises ``RecipeError``."""
    swept, fixed = parse_arguments(arguments)
    if not swept:
        raise RecipeError(
            "nothing varies; name at least one KEY=RANGE such as "
            "optim.adamw.learning_rate=1e-5..1e-3:log or method.lora.rank=8,16,32"
        )
    _refuse_overlap(swept)
    base = load(recipe, fixed)
    keys = tuple(_typed(base, key) for key in swept)
    for key in keys:
        _check_is_in_use(base, key)
        _refuse_overridden(base, key, keys)
    space = Space(base, keys)
    _check_values(space)
    return space


def text_of(recipe: Recipe) -> str:
    """A recipe as YAML. What is left to the run to choose stays so."""
    return emit(plain(recipe))


def plain(recipe: Recipe) -> object:
    """A recipe as plain data, without the settings that nobody has set."""
    data = write(recipe)
    _drop_unset(recipe, data)
    return data


def _drop_unset(section: object, data: dict[str, object]) -> None:
    cls: type = type(section)
    for name, setting in settings(cls).items():
        value, written = getattr(section, name), data[name]
        if isinstance(value, Unset):
            del data[name]
        elif is_section(value) and isinstance(written, dict):
            _drop_unset(value, next(iter(written.values())) if setting.choices else written)


def _refuse_overlap(keys: Sequence[SweptKey]) -> None:
    for number, key in enumerate(keys):
        for other in keys[:number]:
            short, long = sorted((key, other), key=lambda one: len(one.path))
            if short.path == long.path:
                raise RecipeError(f"command line: {key.key} is given twice; keep one")
            if long.path[: len(short.path)] == short.path:
                raise RecipeError(
                    f"command line: {long.key} is a part of {short.key}, so one would replace the "
                    "other; vary one of them, and run a sweep for each value of the other"
                )
    for key in keys:
        if key.key in _OWN:
            raise RecipeError(f"command line: {key.key}={key.text}: {_OWN[key.key]}")


def _typed(base: Recipe, key: SweptKey) -> SweptKey:
    """``key`` with a range of the setting's type. Raises ``RecipeError`` if the recipe does not
    have it, or if it has no numbers."""
    if isinstance(key.values, Choices):
        _read_one(base, key, key.values.items[0])
        return key
    place = f"command line: {key.key}={key.text}"
    kinds = _types(setting_at(Recipe, key.path))
    if not kinds & {int, float}:
        _read_one(base, key, key.values.low)  # which explains an unknown key
        raise RecipeError(f"{place}: this setting has no range; list its values: a,b,c")
    if float in kinds:
        return replace(key, values=replace(key.values, is_integer=False))
    if not key.values.is_integer:
        raise RecipeError(f"{place}: expected integers, such as 8..64, 8..64:8 or 8,16,32")
    return key


def _read_one(base: Recipe, key: SweptKey, value: object) -> Recipe:
    argument = f"{key.key}={as_text(value)}"
    try:
        return read(base, [argument])
    except RecipeError as error:
        place = "" if str(error).startswith("command line") else f"command line: {argument}: "
        raise RecipeError(f"{place}{error}") from None


def _types(setting: Setting | None) -> set[object]:
    """The plain types that a setting can have."""
    if setting is None or setting.choices is not None or setting.section is not None:
        return set()
    hint = setting.hint
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return set(typing.get_args(hint)) if is_union else {hint}


def _check_is_in_use(base: Recipe, key: SweptKey) -> None:
    """Raise ``RecipeError`` if the recipe has another variant than the one of which ``key`` is a
    setting: an override would replace the recipe's by it."""
    found: object = write(base)
    for number, name in enumerate(key.path):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
            continue
        above = key.path[:number]
        setting = setting_at(Recipe, above)
        if setting is None or setting.choices is None:
            return  # a name in a mapping, which may have any
        has = next(iter(found)) if isinstance(found, Mapping) else found
        raise RecipeError(
            f"command line: {key.key}={key.text}: the recipe's {dotted(above)} is {has}, not "
            f"{name}; vary settings of {has}, or add {dotted(above)}={name} to replace it in all "
            "trials"
        )


def _refuse_overridden(base: Recipe, key: SweptKey, keys: Sequence[SweptKey]) -> None:
    """Raise ``RecipeError`` if another setting has precedence over ``key``."""
    stronger = _PRECEDENCE.get(key.path[-1])
    if stronger is None:
        return
    section: object = write(base)
    for name in key.path[:-1]:
        section = section[name] if isinstance(section, Mapping) else None
    value = section.get(stronger) if isinstance(section, Mapping) else None
    name = dotted((*key.path[:-1], stronger))
    if value is None and name not in [other.key for other in keys]:
        return
    what = "varies, too" if value is None else f"is {value}"
    raise RecipeError(
        f"command line: {key.key}={key.text}: has no effect, as {name} has precedence and {what}; "
        f"vary {name} instead, or set it to null"
    )


def _check_values(space: Space) -> None:
    """Raise ``RecipeError`` for a value that the recipe does not allow, or, if there are few
    enough, for a combination."""
    for key in space.keys:
        values = key.values
        ends: list[object] = []
        if isinstance(values, Range):
            ends = [values.value(values.low), values.value(values.high)]
        for value in values.values()[:MAX_CHECKED] + ends:
            made = _read_one(space.base, key, value)
            _must_arrive(made, key, value)
    if space.size is not None and space.size <= MAX_CHECKED:
        for values_of_all in space.combinations():
            made = space.recipe(values_of_all, Path("trial"))
            for key in space.keys:
                _must_arrive(made, key, values_of_all[key.key])


def _must_arrive(recipe: Recipe, key: SweptKey, value: object) -> None:
    """No trial may have another value than the one that the sweep records of it."""
    found: object = recipe
    for name in key.path:
        found = getattr(found, name, found) if is_section(found) else found
    if isinstance(value, int | float) and isinstance(found, int | float):
        assert found == value, f"{key.key}: {found}, not {value}"
