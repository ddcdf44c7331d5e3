"""What commands share before they work: arguments and options, imports of heavy packages without
garbage collections, and the ranks that are started."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from ..parallel.section import ParallelSection
    from ..recipe.recipe import Recipe

F = TypeVar("F", bound=Callable[..., object])


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import inside; the garbage collector is off, and later skips what has been imported.

    torch and transformers make about a million objects, all of which stay. Every collection amid
    them walks those that are there already: a fifth of the processor time until a model trains.
    ``freeze`` sets them aside for good, so that collections during training are short as well.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def start_ranks(
    parallel: ParallelSection,
    modules: Sequence[str],
    more: Sequence[str] = (),
    check: Callable[[int], None] = lambda _: None,
) -> None:
    """If several ranks are to run this command line, with ``more`` words, start them, and exit as
    they do. ``check`` gets their number before, and raises what each of them would raise.
    ``modules`` are imported once, by the process of which the ranks are forks: in it, this checks
    and imports, and returns in each rank."""
    from ..parallel.fork_server import VARIABLE, fork_ranks

    if VARIABLE in os.environ:
        fork_ranks(partial(_prepare, modules, check))
        return
    with loading():
        from ..parallel.launcher import launch, num_processes, rerun_command

    if (count := num_processes(parallel)) > 1:
        command, forks = rerun_command([*sys.argv[1:], *more]), sys.platform == "linux"
        if not forks:
            check(count)
        raise SystemExit(launch(command, count, parallel.max_restarts, forks=forks))


def _prepare(modules: Sequence[str], check: Callable[[int], None], count: int) -> None:
    check(count)  # errors come before the slow imports
    with loading():
        for module in modules:
            with contextlib.suppress(Exception):  # each rank raises it again, and says it
                importlib.import_module(module)


def resolved_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe at ``path``, or of the words of another program that begin with ``path``, with
    what it names found. What is wrong with it is reported before the slow imports."""
    from ..recipe.recipe import convert, load, load_converted
    from ..run.resolving import resolved

    converted = convert([str(path), *overrides]) if is_option(path) else None
    return resolved(load(path, overrides) if converted is None else load_converted(converted))


class TakesWords(click.Command):
    """A command of a recipe that takes words such as ``--stage sft`` in its place."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """With a recipe, an option that is misspelled stays an error that names the nearest."""
        ctx.ignore_unknown_options = args[:1] != [] and is_option(Path(args[0]))
        return super().parse_args(ctx, args)


def is_option(recipe: Path) -> bool:
    """Whether a command line has words such as ``--stage sft`` in place of a recipe."""
    return str(recipe).startswith("--")


def recipe_arguments(command: F) -> F:
    """RECIPE and its OVERRIDES."""
    path = click.argument("recipe", type=click.Path(path_type=Path))
    return path(click.argument("overrides", nargs=-1)(command))


thinking_option = click.option(
    "--thinking/--no-thinking",
    default=None,
    help="Switch thinking, if the template has enable_thinking; else as the template does.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type of the weights.",
)
trust_remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run code that comes with the model."
)
