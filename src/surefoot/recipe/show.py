"""Show a recipe: every setting, defaults marked, and on request its documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from ..schema import is_section, settings, variant_name, write, write_setting
from .yaml import emit

WIDTH = 100


@dataclass(frozen=True)
class RecipeLine:
    """One line of YAML."""

    text: str
    is_default: bool = False


def lines(section: object, *, docs: bool = False, indent: str = "") -> Iterator[RecipeLine]:
    """``section`` as YAML that reads back equal; ``docs`` adds the settings' documentation."""
    cls: type = type(section)
    for name, setting in settings(cls).items():
        value, inner = getattr(section, name), f"{indent}  "
        is_default = value == setting.default
        if docs and setting.doc:
            yield from _comment(setting.doc, indent)
        if is_section(value):
            variant = variant_name(setting.choices, value) if setting.choices else None
            if variant and not write(value):
                yield _line(f"{indent}{name}: {variant}", is_default)
                continue
            yield RecipeLine(f"{indent}{name}:", is_default)
            if variant:
                yield RecipeLine(f"{inner}{variant}:", is_default)
                inner = f"{inner}  "
            yield from lines(value, docs=docs, indent=inner)
        else:
            for text in emit({name: write_setting(setting, value)}).splitlines():
                yield _line(f"{indent}{text}", is_default)


def _line(text: str, is_default: bool) -> RecipeLine:
    return RecipeLine(f"{text}  # default" if is_default else text, is_default)


def _comment(doc: str, indent: str) -> Iterator[RecipeLine]:
    for line in textwrap.wrap(doc, WIDTH - len(indent) - 2):
        yield RecipeLine(f"{indent}# {line}", is_default=True)
