"""What a sweep varies, as it is typed, and the recipes of its trials; what is wrong with them is
found before any starts."""

from __future__ import annotations

import itertools
import json
import math
import re
import typing
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from ...errors import RecipeError
from ...recipe.comparison import changes
from ...recipe.recipe import Recipe, load, read
from ...recipe.yaml import emit, parse_argument
from ...schema import expand, setting_at, write

FORMS = "LOW..HIGH, LOW..HIGH:log or values such as 8,16,32"
MAX_CHECKED = 300  # values of a setting, or combinations, that are checked before the start
_EXAMPLE = "KEY=RANGE such as optim.adamw.learning_rate=1e-5..1e-3:log"
_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?::\s*(log))?")
_BEGINS_AS_RANGE = re.compile(rf"{_NUMBER}\s*\.\.")
_NOT_VARIED = {
    "train.output_dir": "each trial has a folder of its own; name the sweep's with --output",
    "train.cache_dir": "trials are in the folder of the sweep",
}
# A setting, and its neighbor that has precedence where it is set.
_PRECEDENCE = {"num_epochs": "max_steps", "warmup_ratio": "warmup_steps"}

Values = Mapping[str, object]  # of the settings that vary, by dotted path


@dataclass(frozen=True)
class SweptKey:
    """A setting that a sweep varies."""

    key: str  # dotted
    text: str  # its values, as they were typed
    distribution: BaseDistribution  # several choices are their texts in JSON

    def values(self) -> Sequence[object] | None:
        """All its values; None if there is no end of them."""
        if isinstance(self.distribution, CategoricalDistribution):
            return [self.value(text) for text in self.distribution.choices]
        if isinstance(self.distribution, IntDistribution):
            return range(self.distribution.low, self.distribution.high + 1)
        return None

    def checked(self) -> Sequence[object]:
        """The values that are tried before the start, both ends among them."""
        if isinstance(self.distribution, FloatDistribution):
            return self.distribution.low, self.distribution.high
        values = self.values() or ()
        return [*values[:MAX_CHECKED], values[-1]]

    def value(self, param: object) -> object:
        """The value of the setting that is ``param`` in the study."""
        return json.loads(param) if isinstance(param, str) else param

    def param(self, value: object) -> object:
        """A value of the setting, as the study stores it."""
        is_choice = isinstance(self.distribution, CategoricalDistribution)
        return as_text(value) if is_choice else value


def as_text(value: object) -> str:
    """A value as YAML on one line."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Space:
    """The recipe of all trials, and what varies."""

    base: Recipe
    keys: tuple[SweptKey, ...]

    @property
    def size(self) -> int | None:
        """The number of combinations; None if it has no end."""
        values = [key.values() for key in self.keys]
        return None if None in values else math.prod(len(choices or ()) for choices in values)

    def combinations(self) -> Iterator[dict[str, object]]:
        """All of them, the last setting varying fastest."""
        for values in itertools.product(*(key.values() or () for key in self.keys)):
            yield {key.key: value for key, value in zip(self.keys, values, strict=True)}

    def recipe(self, values: Values, folder: Path) -> Recipe:
        """The recipe of a trial in ``folder``. Raises ``RecipeError`` if values contradict each
        other."""
        trial_recipe = read(self.base, [f"{key}={as_text(value)}" for key, value in values.items()])
        return replace(trial_recipe, train=replace(trial_recipe.train, output_dir=folder))


def plain(recipe: Recipe) -> object:
    """A recipe as plain data. What is left to the run to choose stays so."""
    return write(expand(Recipe, recipe))


def text_of(recipe: Recipe) -> str:
    """A recipe as YAML, for ``surefoot train``."""
    return emit(plain(recipe))


def open_space(recipe: Path, arguments: Sequence[str]) -> Space:
    """The space of a sweep, with every key and value checked. Raises ``RecipeError``."""
    swept: dict[str, str] = {}
    fixed: list[str] = []
    for argument in arguments:
        name, _, text = (part.strip() for part in argument.partition("="))
        if not text or not all(name.split(".")):
            raise RecipeError(
                f"command line: {argument!r}: expected {_EXAMPLE}; a range is {FORMS}"
            )
        if not _BEGINS_AS_RANGE.match(text) and len(_items(name, text)) == 1:
            fixed.append(argument)
        elif name in swept:
            raise RecipeError(f"command line: {name} is given twice; keep one")
        else:
            swept[name] = text
    if not swept:
        raise RecipeError(
            f"nothing varies; name at least one {_EXAMPLE} or method.lora.rank=8,16,32"
        )
    base = load(recipe, fixed)
    space = Space(base, tuple(_key(base, name, text) for name, text in swept.items()))
    for key in space.keys:
        _check(base, key, swept)
    # Values that are right alone may contradict each other; those of later combinations fail when
    # their turn comes.
    combinations = itertools.product(*(key.checked() for key in space.keys))
    for values in itertools.islice(combinations, MAX_CHECKED):
        space.recipe(dict(zip(swept, values, strict=True)), Path("trial"))
    return space


def _items(key: str, text: str) -> list[object]:
    items = parse_argument(f"[{text}]", f"command line: {key}={text}")
    assert isinstance(items, list)
    return items


def _key(base: Recipe, key: str, text: str) -> SweptKey:
    """A setting with a range of its type. Raises ``RecipeError`` if the recipe does not have it, or
    if it has no numbers."""
    place = f"command line: {key}={text}"
    if key in _NOT_VARIED:
        raise RecipeError(f"{place}: {_NOT_VARIED[key]}")
    if not _BEGINS_AS_RANGE.match(text):
        texts = [as_text(item) for item in _items(key, text)]
        if len(set(texts)) < len(texts):
            raise RecipeError(f"{place}: a value is given twice; keep one")
        return SweptKey(key, text, CategoricalDistribution(texts))
    if (range_match := _RANGE.fullmatch(text)) is None:
        raise RecipeError(f"{place}: expected {FORMS}")
    low, high, scale = range_match.groups()
    setting = setting_at(Recipe, key.split("."))
    is_plain = setting is not None and setting.choices is None and setting.section is None
    hint = setting.hint if setting is not None and is_plain else None
    types = {*typing.get_args(hint), hint}
    if not types & {int, float}:
        _read_one(base, key, float(low))  # which explains an unknown key
        raise RecipeError(f"{place}: this setting has no range; list its values: a,b,c")
    distribution: BaseDistribution
    try:
        if float in types:
            distribution = FloatDistribution(float(low), float(high), scale == "log")
        else:
            distribution = IntDistribution(int(low), int(high), scale == "log")
    except ValueError as error:  # no integers, or ends in the wrong order
        raise RecipeError(f"{place}: expected {FORMS}: {error}") from None
    if distribution.single():
        raise RecipeError(f"{place}: {low} must be below {high}")
    return SweptKey(key, text, distribution)


def _check(base: Recipe, key: SweptKey, swept: Container[str]) -> None:
    """Raise ``RecipeError`` for a value that the recipe does not allow, and where not the setting
    alone would vary, or without effect."""
    place = f"command line: {key.key}={key.text}"
    section, _, name = key.key.rpartition(".")
    if name in _PRECEDENCE:
        stronger = f"{section}.{_PRECEDENCE[name]}"
        value: object = base
        for part in stronger.split("."):
            value = getattr(value, part, value)  # the name of a variant is no attribute
        if value is not None or stronger in swept:
            raise RecipeError(
                f"{place}: has no effect, as {stronger} has precedence and "
                f"{'varies, too' if value is None else f'is {value}'}; vary {stronger} instead, or "
                "set it to null"
            )
    for swept_value in key.checked():
        for change in changes(base, _read_one(base, key.key, swept_value)):
            changed = setting_at(Recipe, change.path.split("."))
            if key.key.startswith(f"{change.path}.") and changed is not None and changed.choices:
                raise RecipeError(
                    f"{place}: the recipe's {change.path} is {change.old}, not {change.new};"
                    f" vary settings of {change.old}, or add {change.path}={change.new} to replace "
                    "it in all trials"
                )


def _read_one(base: Recipe, key: str, value: object) -> Recipe:
    argument = f"{key}={as_text(value)}"
    try:
        return read(base, [argument])
    except RecipeError as error:
        place = "" if str(error).startswith("command line") else f"command line: {argument}: "
        raise RecipeError(f"{place}{error}") from None
