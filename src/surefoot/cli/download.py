"""``surefoot download``: fetch the model and the datasets of a recipe, before a run."""

from __future__ import annotations

from pathlib import Path

import click

from ..terminal_text import visible
from .loading import loading, resolved_recipe


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def download(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Download the model and the datasets of RECIPE, so that it also runs without a network.

    What is on this machine already is only checked. An interrupted download is resumed by the same
    command. Every file is verified by the hash that its hub announces. Afterwards, HF_HUB_OFFLINE=1
    forbids any further request.

    OVERRIDES are dotted fields such as model.hub=modelscope.
    """
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ..data.rows.catalog import Catalog
        from ..recipe.recipe_data import find_base

    click.echo(visible(f"model: {find_base(loaded)}"))
    for entry in Catalog(loaded.data).entries:
        entry.source.stamp()
        click.echo(visible(f"{entry.name}: {entry.source}"))
