"""``--to NAME`` of ``export`` and ``ckpt convert``, and the options made of the targets' fields."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from ..checkpoint.layouts.detection import detect_layout
from ..checkpoint.layouts.layout import Reading
from ..checkpoint.layouts.reading import READING, check_reading, without_none
from ..errors import CheckpointError, ModelError, installation
from ..parallel.sharding import Mesh
from ..schema import Setting, settings
from ..schema.locations import ModelPath
from ..schema.named_values import pairs

if TYPE_CHECKING:
    from ..checkpoint.converting.targets import Target


_MESH = "for example dp_shard=4,tp=2"


def parse_mesh(text: str) -> Mesh:
    """``dp_shard=4,dp_replicate=2`` to a mesh. Raises ``CheckpointError`` for anything else."""
    axes = [*Mesh().sizes]
    odd = f"a checkpoint is sharded along {', '.join(axes[:-1])} and {axes[-1]}, not {{}}"
    sizes: dict[str, int] = {}
    for axis, size in pairs(text, axes, option="mesh", odd=odd, example=_MESH):
        if not (size.isascii() and size.isdecimal() and len(size) < 10):
            raise CheckpointError(
                f"mesh {text!r}: {axis} must be a whole number, got {size!r}; {_MESH}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)


# Fields that are one text on the command line.
_PARSERS: Mapping[Any, Callable[[str], object]] = {Mesh: parse_mesh}
_METAVARS: Mapping[Any, str] = {Mesh: "AXIS=N[,AXIS=N]"}


class ReadingCommand(click.Command):
    """A command that opens weights, with the options for reading those of other programs. They are
    of the folders that it names, or else those of ``model.reading``, if it takes overrides."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """These options are the last."""
        *params, last = super().get_params(ctx)
        options = [option({kind: each}) for kind, each in reading_settings().values()]
        return [*params, *options, last]

    def invoke(self, ctx: click.Context) -> object:
        """Give them to the command as ``read_as``, or as overrides."""
        given = {name: ctx.params.pop(name) for name in reading_settings()}
        reading = {n: ModelPath(value) for n, value in given.items() if value is not None}
        model = ctx.params.get("model")  # of eval, beside a recipe
        if "overrides" in ctx.params and not (model and _has_options(model)):
            settings = (f"model.reading.{name}={value}" for name, value in reading.items())
            ctx.params["overrides"] = (*ctx.params["overrides"], *settings)
        else:
            if reading:
                named = [value for value in ctx.params.values() if isinstance(value, str | Path)]
                folders = [each for each in named if Path(each).is_dir() or _has_options(each)]
                check_reading(folders, reading)
            ctx.params["read_as"] = reading
        return super().invoke(ctx)


def reading_settings() -> dict[str, tuple[str, Setting]]:
    """The options for reading folders by name, each with its layout."""
    return {
        n: (layout, each) for layout, cls in READING.items() for n, each in settings(cls).items()
    }


def _has_options(folder: Path | str) -> bool:
    layout = detect_layout(Path(folder))
    return layout is not None and layout.name in READING


class TargetCommand(click.Command):
    """A command with ``--to`` and the options of every target. These are read from the targets
    when the command is called, so that no other command waits for torch."""

    usual: ClassVar[str] = "surefoot is the default with --layout or --mesh"

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options of the targets come between its own and the last."""
        from ..checkpoint.converting.targets import TARGETS

        command_params = super().get_params(ctx)
        sections: dict[str, type] = dict(TARGETS)
        # a layout may have the name of a target
        sections |= {f"{name} (SRC)": cls for name, cls in READING.items()}
        fields: dict[str, dict[str, Setting]] = {}
        for target, cls in sections.items():
            for name, setting in settings(cls).items():
                fields.setdefault(name, {})[target] = setting
        target_options = [_to(TARGETS, self.usual), *map(option, fields.values())]
        first = sum(isinstance(param, click.Argument) for param in command_params)
        return [*command_params[:first], *target_options, *command_params[first:]]


def _to(targets: Mapping[str, type], usual: str) -> click.Option:
    descriptions = "; ".join(f"{name}: {_said(cls)}" for name, cls in targets.items())
    help_text = f"What to write. {descriptions}. {usual}."
    return click.Option(["--to", "kind"], type=click.Choice(list(targets)), help=help_text)


def _said(cls: type) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0].rstrip(".").replace("``", "")


def option(same: Mapping[str, Setting]) -> click.Option:
    """The option for the fields of one name, by target: a switch for a bool, a choice for a
    Literal, a file for a Path."""
    setting = next(iter(same.values()))
    help_text, hint = setting.doc.replace("`", ""), without_none(setting.hint)
    if hint is bool:
        return click.Option([option_name(setting.name)], is_flag=True, default=None, help=help_text)
    if typing.get_origin(hint) is Literal:
        choices = {
            target: typing.get_args(without_none(target_setting.hint))
            for target, target_setting in same.items()
        }
        every = dict.fromkeys(name for names in choices.values() for name in names)
        if len(set(choices.values())) > 1:
            by_target = "; ".join(
                f"{target}: {', '.join(names)}" for target, names in choices.items()
            )
            help_text = f"{help_text} {by_target}."
        return click.Option(
            [option_name(setting.name)], type=click.Choice(list(every)), help=help_text
        )
    usual = "NAME=N[,NAME=N]" if hasattr(hint, "from_text") else _METAVARS.get(hint)
    metavar = getattr(hint, "metavar", usual)
    kind = click.Path(exists=True, path_type=Path) if hint is Path else str
    return click.Option([option_name(setting.name)], type=kind, metavar=metavar, help=help_text)


def target_of(kind: str, explicit_options: Mapping[str, Any]) -> Target:
    """The target ``kind`` with the options that were given. Raises ``UsageError``: one means
    nothing for it."""
    from ..checkpoint.converting.targets import TARGETS

    target_settings = settings(TARGETS[kind])
    if odd := [name for name in explicit_options if name not in target_settings]:
        takes = ", ".join(option_name(name) for name in sorted(target_settings))
        raise click.UsageError(
            f"{option_name(odd[0])} cannot be used with --to {kind}, which accepts {takes}"
        )
    values = {
        name: _parsed(kind, target_settings[name], value)
        for name, value in explicit_options.items()
    }
    return TARGETS[kind](**values)


def reading_of_source(
    kind: str, explicit_options: dict[str, Any], *folders: Path | str | None
) -> Reading:
    """Take from ``explicit_options`` what is an option of SRC, and none of the target ``kind``.
    Raises ``CheckpointError`` if it has no effect on ``folders``."""
    from ..checkpoint.converting.targets import TARGETS

    names = explicit_options.keys() & (reading_settings().keys() - settings(TARGETS[kind]).keys())
    reading = {name: ModelPath(explicit_options.pop(name)) for name in sorted(names)}
    check_reading(folders, reading)
    return reading


@contextmanager
def naming_packages(to: Target) -> Iterator[None]:
    """A block in which a missing package that ``to`` needs is a ``ModelError`` with its cure."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name != to.package:
            raise
        raise ModelError(
            f"this target needs the package {error.name.replace('_', '-')}, which is not "
            f"installed: {installation(error.name)}"
        ) from None


def _parsed(kind: str, setting: Setting, value: Any) -> object:
    """What was given for a field, in the field's type. Raises ``CheckpointError``."""
    hint = without_none(setting.hint)
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        raise click.UsageError(
            f"{option_name(setting.name)} {value} is not written by --to {kind}; expected one of "
            f"{', '.join(typing.get_args(hint))}"
        )
    parse = getattr(hint, "from_text", None) or _PARSERS.get(hint)
    return value if parse is None else parse(value)


def option_name(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{name.replace('_', '-')}"
