"""``surefoot env``: what a bug report needs, and whether all that is installed also loads."""

from __future__ import annotations

import json
from collections.abc import Collection

import click

from ..checkpoint.converting.targets import TARGETS
from ..checkpoint.layouts import LAYOUTS
from ..extensions import installed, problems
from ..methods import METHODS
from ..optim import OPTIMIZERS
from ..run.environment import describe_environment
from ..stages import STAGES
from .main import COMMANDS
from .table import JSON, console, print_json, table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def env(as_json: bool) -> None:
    """Report versions, devices, memory and disk, whether every package loads, and what a recipe
    with default settings uses on this machine."""
    report = describe_environment()
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, facts in report.items():
        width = max(14, *map(len, facts))
        click.secho(title, bold=True)
        for name, value in facts.items():
            text = "; ".join(value) or "cpu only" if isinstance(value, list) else str(value)
            click.secho(f"  {name:<{width}} {text}", fg="red" if "does not load" in text else None)


@click.command()
@JSON
def plugins(as_json: bool) -> None:
    """List the plugins: what each adds, which package it comes from, and why something is missing.

    A package adds a plugin by an entry point of the group surefoot.plugins. The documentation has a
    page for it: docs/how-to/your-own-stage.md.
    """
    built_in: dict[str, Collection[str]] = {"commands": COMMANDS, "layouts": LAYOUTS.own}
    built_in |= {"stages": STAGES.own, "methods": METHODS.own, "optimizers": OPTIMIZERS.own}
    missing = problems({**built_in, "targets": TARGETS.own})
    rows: list[tuple[str | None, ...]] = []
    for each in installed():
        rows += [(each.name, each.source, "", "", each.problem)] if each.problem else []
        for kind, names in each.plugin.lists().items():
            keys = [(each.name, kind, name) for name in names]
            rows += [(each.name, each.source, *key[1:], missing.get(key)) for key in keys]
    columns = ("plugin", "from", "list", "name", "problem")
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    rich_table = table(*columns)
    for row in rows:
        rich_table.add_row(*(cell or "" for cell in row))
    console().print(rich_table)
