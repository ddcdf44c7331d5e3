"""The settings of a section: their types, defaults, choices and documentation."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..errors import RecipeError
from ..storage.remote import Address
from .locations import DatasetReference, FunctionPath, ModelPath

T = TypeVar("T")
Keys = tuple[str | int, ...]  # the way to a value: section, variant, field, index in a list


class Unset(int):
    """The default of an integer setting for which a run chooses another value where none is set.

    It is an ``int`` in every respect; only its type says that nobody has set it, so a recipe that
    sets the default's value has set it.
    """


class UnsetText(str):
    """The same of a text."""

    __slots__ = ()


UNSET = (Unset, UnsetText)


@dataclass(frozen=True)
class Variants:
    """Marks a field, or each item of a list, that is one of ``choices``: name in the recipe -> its
    dataclass."""

    choices: Mapping[str, type]
    of_text: tuple[str, str] | None = None  # what a text that is no name is: a choice, and its key

    def __get_pydantic_core_schema__(
        self, _source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Accept a mapping with exactly one of the names; return the dataclass under it."""
        fields = {
            name: core_schema.typed_dict_field(handler.generate_schema(cls), required=False)
            for name, cls in self.choices.items()
        }
        mapping = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
        return core_schema.no_info_after_validator_function(self._only, mapping)

    def _only(self, by_name: dict[str, object]) -> object:
        if len(by_name) != 1:
            raise PydanticCustomError("variant", "exactly one")
        return next(iter(by_name.values()))


@dataclass(frozen=True)
class MayChange:
    """Marks a setting that may differ between two starts of one run, with all that is below it."""

    means: str = ""  # what is said of a change; empty: no bit and no judgement depends on it
    is_schedule: bool = False  # whether weights of later steps depend on it
    is_evaluation: bool = False  # whether they do where the learning rate follows evaluations


@dataclass(frozen=True)
class Kept:
    """Marks a setting by which saved values mean what they do: a resume takes no other one, in a
    new folder either. So it is of every choice of a variant. A setting with neither mark belongs to
    its run: in a new folder another value is taken from there on, and said."""

    value: Callable[[Any], object] | None = None  # what it comes to, from its section


FREE = MayChange()
ROUNDS = MayChange("the same computation in another order, whose losses agree up to rounding")
FROM_HERE = MayChange("taken from here on")
OF_EVALUATIONS = MayChange("taken from here on", is_evaluation=True)
KEPT = Kept()


@dataclass(frozen=True)
class SameRows:
    """Marks a setting of what is trained on that leaves the rows alone over which a metric is a
    mean, so that runs with several of its values compare."""

    held_out_by: tuple[str, ...] = ()  # settings beside it; if there are any, one must be set

    def hold(self, section: object) -> bool:
        """Whether that is so in the section that has the setting."""
        return not self.held_out_by or any(getattr(section, name) for name in self.held_out_by)


@dataclass(frozen=True)
class Needs:
    """Marks a setting that does nothing unless another one has one of ``values``, or, without any,
    is on. ``name`` is a setting of the same section, or a path from the root; of several names, one
    is enough. A type among ``values`` is any value of it."""

    name: str | tuple[str, ...]
    values: tuple[object, ...] = ()
    above: float = -math.inf  # of a number, or the length of a list, what is on

    def paths(self, section: Keys) -> list[Keys]:
        """Where the other settings are, for a setting in ``section``."""
        names = (self.name,) if isinstance(self.name, str) else self.name
        return [tuple(name.split(".")) if "." in name else (*section, name) for name in names]

    def is_met(self, value: object) -> bool:
        """Whether ``value`` lets the setting do something."""
        if self.values:
            kinds = tuple(each for each in self.values if isinstance(each, type))
            return value in self.values or isinstance(value, kinds)
        size = len(value) if isinstance(value, tuple) else value
        return bool(size) and not (isinstance(size, int | float) and size <= self.above)

    def __str__(self) -> str:
        """What the other one must be, in words."""
        words = {None: "unset", True: "true", False: "false"}
        kinds = [WORDS[each][0] for each in self.values if isinstance(each, type)]
        others = [words.get(v, str(v)) for v in self.values if not isinstance(v, type)]  # type: ignore[call-overload]
        if self.values:
            return f"is {' or '.join(kinds + others)}"
        return "is set" if self.above < 0 else f"is more than {self.above:g}"


@dataclass(frozen=True)
class Setting:
    """One field of a section, for readers, writers and the reference pages."""

    name: str
    hint: object  # its type, without Annotated
    default: object  # dataclasses.MISSING if it must be given
    owner: type  # the section that it is a field of
    choices: Mapping[str, type] | None = None  # set if it holds a variant
    each: Variants | None = None  # set if it holds a list of variants
    section: type | None = None  # set if it holds a section
    may_change: MayChange | None = None  # set if it may differ when a run is resumed
    same_rows: SameRows | None = None
    needs: Needs | None = None  # set if it does nothing without another one
    kept: Kept | None = None  # set if it never may

    @property
    def doc(self) -> str:
        """The string below it in the source, as one line of Markdown, and what it needs."""
        text = documentation(self.owner).get(self.name, "")
        if self.needs is None:
            return text
        names = [self.needs.name] if isinstance(self.needs.name, str) else self.needs.name
        return f"{text} Only where {' or '.join(f'`{name}`' for name in names)} {self.needs}."

    @property
    def is_required(self) -> bool:
        """Whether the recipe must set it."""
        return self.default is dataclasses.MISSING

    @property
    def variants(self) -> Mapping[str, type]:
        """All that it may hold one or several of."""
        return self.choices or (self.each.choices if self.each else {})

    @property
    def expected(self) -> str:
        """Its type in words."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        if self.each is not None:
            if not self.each.choices:
                return "a list of what plugins add; none is installed"
            names = "a list of any of " + ", ".join(self.each.choices)
            of_text = self.each.of_text
            return f"{names}; a text is the {of_text[1]} of a {of_text[0]}" if of_text else names
        return describe(self.hint)


@functools.cache
def settings(cls: type) -> Mapping[str, Setting]:
    """The fields of the section ``cls`` by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: _setting(f, hints[f.name], cls) for f in dataclasses.fields(cls) if f.init}


def setting_at(cls: type, path: Sequence[str | int]) -> Setting | None:
    """The setting at ``path`` under the section ``cls``; None if there is none."""
    section: type | None = cls
    choices: Mapping[str, type] | None = None
    setting: Setting | None = None
    for name in map(str, path):
        if choices is not None:
            section, choices, setting = choices.get(name), None, None
            continue
        setting = settings(section).get(name) if section is not None else None
        section = setting.section if setting else None
        choices = setting.choices if setting else None
    return setting


def is_text(hint: object) -> bool:
    """Whether the values of a type are text, such as names and paths, or null."""
    of = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [arm for arm in of if arm is not type(None)]
    return all(isinstance(arm, type) and issubclass(arm, str | Path) for arm in kinds)


def _setting(field: dataclasses.Field[Any], hint: object, owner: type) -> Setting:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    marks: dict[str, Any] = {
        "may_change": _mark(hint, MayChange),
        "same_rows": _mark(hint, SameRows),
        "needs": _mark(hint, Needs),
        "kept": _mark(hint, Kept),
    }
    if (variants := _mark(hint, Variants)) is not None:
        choices = variants.choices
        return Setting(field.name, hint, default, owner, choices=choices, **marks)
    if typing.get_origin(hint) is tuple and (each := _mark(typing.get_args(hint)[0], Variants)):
        return Setting(field.name, hint, default, owner, each=each, **marks)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    section = hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None
    return Setting(field.name, hint, default, owner, section=section, **marks)


def _mark(hint: object, kind: type[T]) -> T | None:
    return next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, kind)), None)


@functools.cache  # reading sources takes a third of a second: only what shows them pays it
def documentation(cls: type) -> dict[str, str]:
    """The string below each field of ``cls``, as one line of Markdown, by field; inherited fields
    too.

    Empty if there is no source to read, as in an interactive session.
    """
    docs: dict[str, str] = {}
    # Bases first, so that a class says more of a field that it declares again.
    for declaring in reversed(cls.__mro__[:-1]):
        docs |= _documented(declaring)
    return docs


def _documented(cls: type) -> dict[str, str]:
    """The same of the fields that ``cls`` itself declares."""
    try:
        # From the source: Python keeps no string that stands below a field.
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, below in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = markdown(str(below.value.value))
    return docs


def markdown(docstring: str) -> str:
    """A docstring's text on one line, with Markdown's single backticks."""
    return " ".join(docstring.replace("``", "`").split())


WORDS: dict[
    type, tuple[str, str | list[str]]
] = {  # each plain type in words, and in those of a JSON schema
    int: ("an integer", "integer"),
    float: ("a number", "number"),
    bool: ("true or false", "boolean"),
    str: ("text", "string"),
    Path: ("a path", "string"),
    Address: ("a URL", "string"),
    ModelPath: ("a folder or a hub id", "string"),
    FunctionPath: ("a function as file.py:name", "string"),
    DatasetReference: ("a name, a file, a hub id or an entry", ["string", "object"]),
    type(None): ("null", "null"),
}
MANY = {
    **{int: "integers", float: "numbers", Path: "paths"},
    DatasetReference: "names, files, hub ids or entries",
}


def describe(hint: object) -> str:
    """A type in words: ``an integer or null``, ``one of cosine, linear``, ``a list of text``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple:
        return "a list of " + MANY.get(args[0], describe(args[0]).replace("one of", "any of"))
    if origin is Mapping:
        values = "any values" if args[1] is Any else MANY.get(args[1], describe(args[1]))
        return f"names with {values}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "a section (key: value)"
    return WORDS[hint][0] if isinstance(hint, type) and hint in WORDS else str(hint)


def is_section(value: object) -> bool:
    """Whether ``value`` is a section or a variant, not a plain value."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def all_variants(cls: type) -> tuple[type, ...]:
    """The dataclasses that may stand under the section ``cls``; variants can be added any time."""
    below: list[type] = []
    for setting in settings(cls).values():
        inner = [setting.section] if setting.section is not None else []
        for variant in (*inner, *setting.variants.values()):
            below += [variant, *all_variants(variant)]
    return tuple(below)


def variant_name(choices: Mapping[str, type], value: object) -> str:
    """The recipe's name of the variant of which ``value`` is an instance. Raises ``RecipeError`` if
    there is none."""
    for name, cls in choices.items():
        if type(value) is cls:
            return name
    raise RecipeError(
        f"{type(value).__name__} is no class that a recipe has a name for (there are "
        f"{', '.join(choices)}); give callbacks and parts of your own to surefoot.train"
    )


Change = Callable[[Any, Keys], Any]  # of a value, and the path of its setting


def mapped(section: T, change: Change, path: Keys = ()) -> T:
    """``section`` with what ``change`` makes of every value in it, in variants, mappings and lists,
    too. A list is set as one: all that is in it has its path."""
    cls: type = type(section)
    changed = {}
    for name, setting in settings(cls).items():
        value, here = getattr(section, name), (*path, name)
        if setting.choices is not None:
            here = (*here, variant_name(setting.choices, value))
        if (new := _mapped(value, change, here)) is not value:
            changed[name] = new
    return dataclasses.replace(section, **changed) if changed else section  # type: ignore[type-var]


def _mapped(value: Any, change: Change, path: Keys) -> Any:
    if isinstance(value, Mapping):
        items: Any = {key: _mapped(item, change, (*path, key)) for key, item in value.items()}
    elif isinstance(value, tuple):
        items = tuple(_mapped(item, lambda inner, _: change(inner, path), path) for item in value)
    else:
        return mapped(value, change, path) if is_section(value) else change(value, path)
    return value if items == value else items


def changeable(section: object, path: tuple[str, ...] = ()) -> dict[str, MayChange]:
    """The dotted paths in ``section`` at which a resumed run may have other values, there and
    below."""
    cls: type = type(section)
    free: dict[str, MayChange] = {}
    for name, setting in settings(cls).items():
        value, here = getattr(section, name), (*path, name)
        if setting.may_change is not None:
            free[".".join(here)] = setting.may_change
        elif is_section(value):
            variant = (variant_name(setting.choices, value),) if setting.choices else ()
            free |= changeable(value, (*here, *variant))
    return free


def paths(cls: type) -> tuple[Keys, ...]:
    """The path of every setting and variant under the section ``cls``."""
    ways: list[Keys] = []
    for name, setting in settings(cls).items():
        ways.append((name,))
        if setting.section is not None:
            ways += [(name, *way) for way in paths(setting.section)]
        for variant, inner in (setting.choices or {}).items():  # a list is set as one
            ways += [(name, variant), *((name, variant, *way) for way in paths(inner))]
    return tuple(ways)
