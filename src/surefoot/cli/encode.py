"""``surefoot encode``: encode the datasets of a recipe into the cache, before a run."""

from __future__ import annotations

from pathlib import Path

import click

from ..terminal_text import visible
from .loading import resolved_recipe


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def encode(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Encode the datasets of RECIPE into the cache, where training finds them.

    Use it, for example, on a machine with cheap processors before you rent one with a GPU;
    data.cache_dir is then a folder that both can read. With data.streaming, training can start
    before the encoding has ended. Datasets that are already in the cache are not encoded again.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    from ..recipe.recipe_data import encode_datasets, find_base
    from ..run.policy import build_codec

    loaded = resolved_recipe(recipe, overrides)
    codec = build_codec(loaded, find_base(loaded, weights=False))
    for line in encode_datasets(loaded, codec).lines():
        click.echo(visible(line))
