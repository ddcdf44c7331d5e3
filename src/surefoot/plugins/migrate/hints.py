"""What other programs, and habit, call the settings of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

from ...recipe.recipe import Recipe
from ...schema import paths
from .arguments import ARGUMENTS, TRANSFORMERS, Argument
from .programs import PROGRAMS

_TABLE = Path(__file__).with_name("hints.yaml")


@cache
def hints_by_key() -> Mapping[str, str]:
    """The end of the error for an unknown key of a recipe, by the key, or by its section and
    itself. Arguments with the name of a recipe's key at another place are omitted."""
    own, found = {str(path[-1]) for path in paths(Recipe)}, dict[str, str]()
    for table in (TRANSFORMERS, PROGRAMS["trl-sft"].arguments, ARGUMENTS):
        for name, argument in table.items():
            found.setdefault(name, _hint(argument))
    habits = YAML(typ="safe").load(_TABLE)
    for reason, names in habits["reasons"].items():
        found |= dict.fromkeys(names.split(), f"; {reason}")
    found = {name: hint for name, hint in found.items() if hint and name not in own}
    for settings, names in habits["settings"].items():
        found |= dict.fromkeys(names.split(), f" (did you mean {settings}?)")
    return found


def _hint(argument: Argument) -> str:
    if argument.settings:
        if ARGUMENTS.get(argument.settings[0], argument) is not argument:
            return _hint(ARGUMENTS[argument.settings[0]])
        is_setting = "." in argument.settings[0]
        return f" (did you mean {' or '.join(argument.settings)}?)" if is_setting else ""
    reasons = {"ignored": "no setting is needed", "refused": "not supported"}
    known = reasons.get(argument.outcome)
    return f"; {known}: {argument.says}" if known else ""
