"""``surefoot encode``: the datasets of a recipe into the cache, ahead of a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def encode(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Encode the datasets of RECIPE into the cache, where training finds them.

    Where processors are cheap, say, before a machine with a GPU is rented; data.cache_dir then
    names a folder that both see. With data.streaming, training need not wait for the end of it.
    What is in the cache already is not encoded again.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    from ..model.pretrained.loading import resolve
    from ..recipe.recipe import load
    from ..recipe.recipe_data import encode_datasets
    from ..run.assembly import build_codec

    loaded = load(recipe, overrides)
    codec = build_codec(loaded, resolve(loaded.model, weights=False))
    for line in encode_datasets(loaded, codec).lines():
        click.echo(line)
