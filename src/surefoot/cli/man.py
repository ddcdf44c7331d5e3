"""``surefoot man``: manual pages, written from the same help that ``--help`` shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from .. import __version__

SECTION = 1
_RAW = "\b"  # click's mark of a paragraph whose lines stay


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def man(folder: Path) -> None:
    """Write the manual pages of all commands to FOLDER.

    \b
    surefoot man ~/.local/share/man/man1
    man surefoot-train
    """
    root = click.get_current_context().find_root().command
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name, text in pages(root):
        (folder / f"{name}.{SECTION}").write_text(text, encoding="utf-8")
        count += 1
    click.echo(f"wrote {count} manual pages to {folder}")


def pages(root: click.Command) -> Iterator[tuple[str, str]]:
    """The name and the roff text of each page: one for each command."""
    for context in _contexts(root, "surefoot", None):
        name = context.command_path.replace(" ", "-")
        yield name, "\n".join(_page(name, context)) + "\n"


def _contexts(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[click.Context]:
    context = click.Context(command, parent=parent, info_name=name)
    yield context
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from _contexts(found, inner, context)


def _page(name: str, context: click.Context) -> Iterator[str]:
    command = context.command
    yield f'.TH "{name.upper()}" "{SECTION}" "" "surefoot {__version__}" "Surefoot"'
    yield ".SH NAME"
    yield f"{_text(name)} \\- {_text(command.get_short_help_str(200).rstrip('.'))}"
    yield ".SH SYNOPSIS"
    yield f".B {_text(context.command_path)}"
    yield _text(" ".join(command.collect_usage_pieces(context)))
    yield ".SH DESCRIPTION"
    yield from _paragraphs(inspect.cleandoc(command.help or ""))
    records = [p.get_help_record(context) for p in command.get_params(context)]
    yield from _entries("OPTIONS", [record for record in records if record is not None])
    if isinstance(command, click.Group):
        yield from _entries("COMMANDS", list(_commands(command, context)))
    if context.parent is not None:
        yield ".SH SEE ALSO"
        yield f".BR {_text(context.parent.command_path.replace(' ', '-'))} ({SECTION})"


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, str]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None:
            yield name, command.get_short_help_str(200)


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        if number:
            yield ".PP"
        if paragraph.startswith(_RAW):
            yield from (".nf", *map(_text, paragraph.splitlines()[1:]), ".fi")
        else:
            yield _text(" ".join(paragraph.split()))


def _entries(title: str, records: list[tuple[str, str]]) -> Iterator[str]:
    if records:
        yield f".SH {title}"
    for term, about in records:
        yield ".TP"
        yield f"\\fB{_text(term)}\\fR"
        yield _text(" ".join(about.split())) or "\\&"


def _text(text: str) -> str:
    """Text that roff prints as it is."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").strip()
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain
