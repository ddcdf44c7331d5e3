"""Read plain data into frozen dataclasses, strictly, and report all validation errors at once.

A section is a frozen dataclass; the string below a field documents it. A choice between variants is
declared as ``Annotated[Protocol, Variants(CHOICES)]`` and written ``name`` or
``{name: {settings}}``. That dict is the only registry.
"""

from ._problem import Problem, dotted, idle, must
from ._reading import expand, json_schema, read, recipe_error, write, write_setting
from ._setting import (
    FREE,
    FROM_HERE,
    KEPT,
    OF_EVALUATIONS,
    ROUNDS,
    Kept,
    Keys,
    MayChange,
    Needs,
    SameRows,
    Setting,
    Unset,
    UnsetText,
    Variants,
    changeable,
    describe,
    is_section,
    is_text,
    mapped,
    markdown,
    paths,
    setting_at,
    settings,
    variant_name,
)

__all__ = [
    "FREE",
    "FROM_HERE",
    "KEPT",
    "OF_EVALUATIONS",
    "ROUNDS",
    "Kept",
    "Keys",
    "MayChange",
    "Needs",
    "Problem",
    "SameRows",
    "Setting",
    "Unset",
    "UnsetText",
    "Variants",
    "changeable",
    "describe",
    "dotted",
    "expand",
    "idle",
    "is_section",
    "is_text",
    "json_schema",
    "mapped",
    "markdown",
    "must",
    "paths",
    "read",
    "recipe_error",
    "setting_at",
    "settings",
    "variant_name",
    "write",
    "write_setting",
]
