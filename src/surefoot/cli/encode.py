"""``surefoot encode``: encode the datasets of a recipe into the cache, before a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..data.text.codec import Codec
    from ..recipe.recipe import Recipe


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
    from ..model.pretrained.loading import resolve
    from ..recipe.recipe import load
    from ..run.assembly import build_codec

    loaded = load(recipe, overrides)
    for line in lines(loaded, build_codec(loaded, resolve(loaded.model, weights=False))):
        click.echo(line)


def lines(recipe: Recipe, codec: Codec) -> Iterator[str]:
    """Encode, and report the counts of the rows."""
    from ..recipe.recipe_data import encode_all, prepared

    if recipe.data.streaming:
        reports = {report.name: report for report in encode_all(recipe, codec)}
        for report in reports.values():
            yield from report.lines()
    else:
        yield from prepared(recipe, codec).report.lines()
