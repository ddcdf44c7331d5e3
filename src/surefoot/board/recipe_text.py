"""Recipes as text in the browser: problems at their lines, edits by a form, differences of two."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import RecipeError, SurefootError
from ..recipe.files import RUN_RECIPE, read_text
from ..recipe.recipe import Recipe, changes, load_text
from ..recipe.yaml import edited, parse
from ..schema import json_schema

MAX_TEXT = 200_000  # characters; a recipe has about two thousand
_NAME = "recipe"
_PLACE = re.compile(rf"{_NAME}:(\d+)(?::(\d+))? ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class CheckedText:
    """A recipe's text: what is wrong with it, and its plain data as far as it is YAML."""

    problems: list[dict[str, object]]
    data: object
    output_dir: str | None = None


@cache
def schema() -> dict[str, object]:
    """The JSON schema of recipes."""
    return json_schema(Recipe)


def check(text: str, base: Path) -> CheckedText:
    """Check ``text`` as ``surefoot train`` does, without opening models or datasets."""
    if len(text) > MAX_TEXT:
        return CheckedText([_problem(f"longer than {MAX_TEXT:,} characters")], None)
    if not text.strip():
        return CheckedText([_problem("there is no recipe yet")], {})
    data: object = None
    try:
        data = parse(text, _NAME).data
        recipe = load_text(text, _NAME, base)
    except RecipeError as error:
        return CheckedText(_located(str(error)), data)
    except SurefootError as error:
        return CheckedText([_problem(str(error))], data)
    return CheckedText([], data, str(recipe.train.output_dir))


def edit(text: str, keys: Sequence[str], value: object) -> str:
    """``text`` with one setting changed or, if ``value`` is None, removed. Raises
    ``RecipeError``."""
    if len(text) > MAX_TEXT or not keys or len(keys) > 8:
        raise RecipeError("this edit is not one of a recipe")
    return edited(text, keys, value)


def differences(one: Path, other: Path) -> list[Mapping[str, object]]:
    """The settings that differ between the recipes of two runs. Raises ``SurefootError``."""
    old, new = (
        load_text(read_text(run / RUN_RECIPE, follow=False), str(run / RUN_RECIPE), run)
        for run in (one, other)
    )
    found = changes(old, new)
    return [{"path": c.path, "old": c.old, "new": c.new} for c in found]


def _located(message: str) -> list[dict[str, object]]:
    """The problems in an error of several lines, each with its line and column."""
    found: list[dict[str, object]] = []
    for line in message.split("\n"):
        place = _PLACE.fullmatch(line)
        if place:
            column = int(place[2]) if place[2] else 1
            found.append(_problem(place[3], int(place[1]), column))
        elif line.startswith(f"{_NAME}: ") or not found:
            found.append(_problem(line.removeprefix(f"{_NAME}: ")))
        else:
            found[-1]["message"] = f"{found[-1]['message']}\n{line}"
    return found


def _problem(message: str, line: int | None = None, column: int | None = None) -> dict[str, object]:
    return {"line": line, "column": column, "message": message}
