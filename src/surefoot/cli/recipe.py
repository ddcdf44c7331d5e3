"""``surefoot recipe``: show a recipe in full, check it, convert a foreign one, print the JSON
schema."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..terminal_text import visible


@click.group()
def recipe() -> None:
    """Show a recipe in full, check it, convert another tool's file, or print the JSON schema."""


@recipe.command()
@click.argument("path", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--docs", is_flag=True, help="Print the documentation of every setting above it.")
def show(path: Path, overrides: tuple[str, ...], docs: bool) -> None:
    """Print RECIPE with all settings, defaults dimmed and marked.

    OVERRIDES are dotted fields such as optim.adamw.learning_rate=5e-5. The output is a valid
    recipe.
    """
    from ..recipe.recipe import lines, load

    for line, is_default in lines(load(path, overrides), docs=docs):
        click.secho(line, dim=is_default)


@recipe.command()
@click.argument(
    "paths", metavar="RECIPE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: each recipe and its problem.")
def check(paths: tuple[Path, ...], as_json: bool) -> None:
    """Read each RECIPE as `train` does, and say what is wrong with it. For a check of a repository:
    it looks at no model and no rows, and the exit code is 2 if a recipe is wrong.

    \b
    surefoot recipe check recipes/*.yaml
    """
    from ..errors import SurefootError
    from ..recipe.recipe import convert as convert_file
    from ..recipe.recipe import load, load_converted

    found: list[dict[str, str | None]] = []
    for path in paths:
        problem = None
        try:
            converted = convert_file((str(path),))
            load(path) if converted is None else load_converted(converted)
        except SurefootError as error:
            problem = str(error)
        found.append({"recipe": str(path), "problem": problem})
        if not as_json:
            click.echo(visible(problem or f"{path}: valid"), err=problem is not None)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    if num_wrong := sum(one["problem"] is not None for one in found):
        click.echo(f"{num_wrong} of {len(paths)} wrong", err=True)
        raise SystemExit(2)


@recipe.command(context_settings={"ignore_unknown_options": True})
@click.argument("path", metavar="FILE")
@click.argument("overrides", nargs=-1)
@click.option(
    "--from",
    "program",
    metavar="NAME",
    help="Whose FILE it is, if several programs have its keys: one of the importers that `surefoot "
    "plugins` lists, such as transformers.",
)
def convert(path: str, overrides: tuple[str, ...], program: str | None) -> None:
    """Print the FILE of another program as a recipe: LLaMA-Factory's, TRL's YAML of a trainer,
    axolotl's, transformers' TrainingArguments as JSON, and MindSpore Transformers'.

    LLaMA-Factory's arguments can also take the place of FILE: --stage sft --do_train True ...

    Keys that Surefoot does not support are rejected, each with the reason. Standard error shows
    what differs from the program, which data the recipe of MindSpore Transformers still needs, and
    the keys that have no effect. OVERRIDES such as data.datasets=[mine] have
    precedence.
    """
    from ..recipe.recipe import convert as convert_file
    from ..recipe.recipe import load_converted, unknown
    from ..recipe.yaml import emit

    converted = convert_file((path, *overrides), program)
    if converted is None:
        raise unknown(Path(path))
    if converted.is_complete:
        load_converted(converted)  # which rejects what no recipe can have
    click.echo(emit(converted.document.data), nl=False)
    for note in converted.notes:
        click.echo(visible(note), err=True)


@recipe.command()
def schema() -> None:
    """Print the JSON schema of recipes, for completion and checks in editors.

    \b
    Save it, and editors know recipes by a first line such as
    # yaml-language-server: $schema=surefoot.schema.json
    """
    from ..recipe.recipe import Recipe
    from ..schema import json_schema

    click.echo(json.dumps(json_schema(Recipe), indent=2))
