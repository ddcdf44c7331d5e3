"""Command-line options made of the fields of conversion targets."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import click

from ...parallel.mesh import Mesh
from ...schema import Setting, settings
from ..option_text import parse_mesh

# Fields of several settings, which are one text on the command line.
_PARSERS: Mapping[Any, Callable[[str], object]] = {Mesh: parse_mesh}
_METAVARS: Mapping[Any, str] = {Mesh: "AXIS=N[,AXIS=N]"}


class TargetCommand(click.Command):
    """A command with ``--to`` and the options of every target. These are read from the targets
    when the command is called, so that no other command waits for torch."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options of the targets come between its own and the last."""
        from ...checkpoint.converting.targets import READING, TARGETS

        own = super().get_params(ctx)
        known = all_settings([*TARGETS.values(), *READING.values()])
        made = [_to(TARGETS), *map(option, known.values())]
        first = sum(isinstance(param, click.Argument) for param in own)
        return [*own[:first], *made, *own[first:]]


def _to(targets: Mapping[str, type]) -> click.Option:
    told = "; ".join(f"{name}: {_said(cls)}" for name, cls in targets.items())
    help_text = f"What to write. {told}. surefoot is the default with --layout or --mesh."
    return click.Option(["--to", "kind"], type=click.Choice(list(targets)), help=help_text)


def _said(cls: type) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0].rstrip(".").replace("``", "")


def all_settings(targets: Iterable[type]) -> dict[str, Setting]:
    """The fields of all targets by name; of equal names the first."""
    found: dict[str, Setting] = {}
    for cls in targets:
        for name, setting in settings(cls).items():
            found.setdefault(name, setting)
    return found


def option(setting: Setting) -> click.Option:
    """The option for a field: a switch for a bool, a choice for a Literal, a file for a Path."""
    flag, help_text = f"--{setting.name.replace('_', '-')}", setting.doc.replace("`", "")
    hint = _without_none(setting.hint)
    if hint is bool:
        return click.Option([flag], is_flag=True, default=None, help=help_text)
    metavar = "NAME=N[,NAME=N]" if hasattr(hint, "from_text") else _METAVARS.get(hint)
    return click.Option([flag], type=_type(hint), metavar=metavar, help=help_text)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    (found,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return found


def _type(hint: Any) -> click.ParamType[Any] | type:
    if typing.get_origin(hint) is Literal:
        return click.Choice(typing.get_args(hint))
    if hint is Path:
        return click.Path(exists=True, path_type=Path)
    return str


def parsed(setting: Setting, value: Any) -> object:
    """What was given for a field, in the field's type. Raises ``CheckpointError``."""
    hint = _without_none(setting.hint)
    parse = getattr(hint, "from_text", None) or _PARSERS.get(hint)
    return value if parse is None else parse(value)


def option_name(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{name.replace('_', '-')}"
