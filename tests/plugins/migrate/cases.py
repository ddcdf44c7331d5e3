"""Files of other trainers and what they mean, one case after another in a YAML file.

A case has the values of a ``file``, and of what it becomes: settings of its ``recipe``, words of
its ``notes``, words on which they are ``silent``, what it ``runs`` after training; or the words
with which it is ``refused``.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from surefoot.errors import RecipeError
from surefoot.recipe.recipe import load_converted


def of(path):
    """The parameters of a test."""
    return [
        pytest.param(case, id=f"{case.get('from', '')} {json.dumps(case['file'])}")
        for case in YAML(typ="safe").load(path)
    ]


def check(case, translate):
    """``translate`` reads the file of ``case`` as a recipe."""
    if "refused" in case:
        with pytest.raises(RecipeError) as caught:
            load_converted(translate(case))
        for words in case["refused"]:
            assert words in str(caught.value)
        return
    converted = translate(case)
    notes = "\n".join(converted.notes)
    for words in case.get("notes", []):
        assert words in notes
    for words in case.get("silent", []):
        assert words not in notes
    if "runs" in case:
        after = converted.extras.after
        assert (after and [*after.parts]) == case["runs"]
    if "recipe" in case:
        recipe = load_converted(converted)
        found = {name: _plain(attrgetter(name)(recipe)) for name in case["recipe"]}
        assert found == case["recipe"]


def _plain(value):
    """A setting as YAML has it; a section by the name of its variant."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    if isinstance(value, Mapping):
        return dict(value)
    return os.path.relpath(value) if isinstance(value, Path) else value
