"""``surefoot env``: what a bug report needs, and whether all that is installed also loads."""

from __future__ import annotations

import json

import click

from ..run.environment import describe_environment


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
