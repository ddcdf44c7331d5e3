"""``surefoot recipe``: show a recipe in full, convert a foreign one, print the JSON schema."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..terminal_text import visible

_SOURCES = ("trl-sft", "trl-dpo", "trl-kto", "trl-reward", "trl-grpo", "axolotl", "transformers")


@click.group()
def recipe() -> None:
    """Show a recipe in full, convert another tool's file, or print the JSON schema."""


@recipe.command()
@click.argument("path", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--docs", is_flag=True, help="Print the documentation of every setting above it.")
def show(path: Path, overrides: tuple[str, ...], docs: bool) -> None:
    """Print RECIPE with all settings, defaults dimmed and marked.

    OVERRIDES are dotted fields such as optim.adamw.learning_rate=5e-5. The output is a valid
    recipe.
    """
    from ..recipe.recipe import load
    from ..recipe.show import lines

    for line in lines(load(path, overrides), docs=docs):
        click.secho(line.text, dim=line.is_default)


@recipe.command(context_settings={"ignore_unknown_options": True})
@click.argument("path", metavar="FILE")
@click.argument("overrides", nargs=-1)
@click.option(
    "--from",
    "source",
    type=click.Choice(_SOURCES),
    help="Whose FILE it is, if it is neither LLaMA-Factory's nor MindSpore Transformers'.",
)
def convert(path: str, overrides: tuple[str, ...], source: str | None) -> None:
    """Print the FILE of another program as a recipe: LLaMA-Factory's, MindSpore Transformers', and
    with --from TRL's YAML of a trainer, axolotl's, or transformers' TrainingArguments as JSON.

    LLaMA-Factory's arguments can also take the place of FILE: --stage sft --do_train True ... Of
    MindSpore Transformers with run_mode: predict, the output is a file for `surefoot predict`.

    Keys that Surefoot does not support are rejected, each with the reason. Standard error shows
    what differs from LLaMA-Factory, or what datasets of MindSpore Transformers need in addition to
    the recipe, and the keys that have no effect. OVERRIDES such as data.datasets=[mine] have
    precedence.
    """
    from ..recipe.conversion import convert_any

    found = convert_any((path, *overrides), source)
    click.echo(found.text, nl=False)
    for note in found.notes:
        click.echo(visible(note), err=True)


@recipe.command()
def schema() -> None:
    r"""Print the JSON schema of recipes, for completion and checks in editors.

    \b
    Save it, and editors know recipes by a first line such as
    # yaml-language-server: $schema=surefoot.schema.json
    """
    from ..recipe.recipe import Recipe
    from ..schema import json_schema

    click.echo(json.dumps(json_schema(Recipe), indent=2))
