"""``surefoot runs tag``: words that a person gives to a run."""

from __future__ import annotations

from pathlib import Path

import click

from ..table import JSON, print_json
from .root import ROOT, opened_run


@click.command()
@click.argument("run", type=ROOT)
@click.argument("tags", nargs=-1)
@click.option("--remove", multiple=True, metavar="TAG", help="Remove a tag; may be repeated.")
@JSON
def tag(run: Path, tags: tuple[str, ...], remove: tuple[str, ...], *, as_json: bool) -> None:
    """Add TAGS to RUN and print the tags that it has now; without TAGS, only print them.

    They are in tags.json in the run's folder. The board and `surefoot runs ls --filter` find runs
    by them.
    """
    from ...board.reports.runs import set_tags
    from ...board.reports.tags import read_tags

    board = opened_run(run)
    found = set_tags(board, ".", tags, remove)["tags"] if tags or remove else read_tags(board.root)
    if as_json:
        print_json({"tags": found})
    else:
        click.echo(" ".join(found) or "no tags")  # type: ignore[arg-type]
