"""``surefoot demo``: a small model learns to read orders, before your eyes.

Runs the commands that anyone would type, and shows what the model answers to orders that it never
saw, before and after. Model and data come with the package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ..errors import RunError
from ..storage.files import read_file

RECIPE, RUN = "quickstart.yaml", Path("runs/quickstart")
PARTS = (RECIPE, "own.yaml", "base-model", "data")
NUM_SHOWN, EXPECTED = 4, 0.9
Generations = Sequence[Mapping[str, object]]


@click.command()
@click.argument("folder", default="surefoot-demo", type=click.Path(path_type=Path, file_okay=False))
def demo(folder: Path) -> None:
    """Train the bundled model on the bundled data, and show what it has learned.

    Takes about two minutes on two cores, without a GPU or a network. Model, data and recipe are
    copied to FOLDER, where they can be changed and used again; what is there already is kept.
    """
    copy_files(folder)
    run_demo(folder, RECIPE)


def copy_files(folder: Path) -> None:
    """Copy the files of the demo to ``folder``; those that exist are kept."""
    source = files_of_demo()
    for part in PARTS:
        for path in sorted([source / part, *(source / part).rglob("*")]):
            target = folder / path.relative_to(source)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def files_of_demo() -> Path:
    """The folder with the files: in the installed package, or in a clone."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "demo", package.parent.parent / "examples"):
        if (folder / RECIPE).is_file():
            return folder
    raise RunError(f"{package / 'demo'} is missing; install surefoot again")


def run_demo(folder: Path, recipe: str) -> None:
    """Ask, train, ask again. Raises ``RunError`` if the model has not learned its task."""
    start = time.monotonic()
    before, after = RUN / "generations-base.jsonl", RUN / "generations-trained.jsonl"
    _surefoot(folder, "eval", recipe, "--model", "base", "--output", str(before))
    _surefoot(folder, "train", recipe)
    _surefoot(folder, "eval", recipe, "--output", str(after))
    trained = _generations(folder / after)
    _show(_generations(folder / before), trained)
    click.secho(f"{time.monotonic() - start:.0f} seconds. Now talk to it:", dim=True)
    click.echo(f"  surefoot chat {folder / RUN if folder != Path() else RUN}")
    if exact_match(trained) < EXPECTED:
        raise RunError(f"fewer than {EXPECTED:.0%} of the answers are right")


def exact_match(answers: Generations) -> float:
    """The share of answers that are right to the letter."""
    return sum(bool(answer["match"]) for answer in answers) / len(answers)


def _surefoot(folder: Path, *arguments: str) -> None:
    """Show a command, and run it in ``folder``."""
    click.secho(f"\n$ surefoot {' '.join(arguments)}", fg="cyan", bold=True)
    command = [sys.executable, "-P", "-m", "surefoot", *arguments]
    ended = subprocess.run(command, cwd=folder, check=False)
    if ended.returncode != 0:
        raise RunError(f"`surefoot {' '.join(arguments)}` has failed; its error is printed above")


def _generations(path: Path) -> Generations:
    """What ``surefoot eval`` wrote: prompt, reference, answer and match of every held-out order."""
    return [json.loads(line) for line in read_file(path).decode().splitlines()]


def _question(prompt: str) -> str:
    """The user's words in a rendered prompt."""
    words = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return words.replace("\n", "  ")


def _show(before: Generations, after: Generations) -> None:
    """The first few orders with both answers, then the figures."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table.grid(padding=(0, 1))
    for old, new in zip(before[:NUM_SHOWN], after[:NUM_SHOWN], strict=True):
        mark, style = ("right", "green") if new["match"] else ("wrong", "red")
        table.add_row("order", Text(_question(str(old["prompt"])), style="bold"))
        table.add_row("before", Text(str(old["answer"]).strip(), style="yellow"))
        table.add_row("after", Text(f"{new['answer']}  ({mark})", style=style))
        table.add_row()
    console.print()
    console.print(Panel(table, title="orders it never saw", title_align="left"))
    console.print(
        f"exact match on {len(after)} held-out orders:",
        Text(f"{exact_match(before):.1%}", style="yellow"),
        "before,",
        Text(f"{exact_match(after):.1%}", style="bold green"),
        "after",
    )
