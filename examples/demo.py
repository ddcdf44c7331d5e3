"""``make demo``: a small model learns to read orders, before your eyes.

Runs the commands that anyone would type, and shows what the model answers to orders that it never
saw, before and after. Fails if it does not get nine in ten of them right to the letter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RECIPE, RUN = "examples/quickstart.yaml", Path("runs/quickstart")
NUM_SHOWN, EXPECTED = 4, 0.9
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def surefoot(*arguments: str) -> None:
    """Show a command, and run it."""
    console.print(f"\n[bold cyan]$ surefoot {' '.join(arguments)}")
    subprocess.run([Path(sys.executable).with_name("surefoot"), *arguments], check=True)


def generations(path: Path) -> list[dict[str, str | bool]]:
    """What ``surefoot eval`` wrote: prompt, reference, answer and match of every held-out order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def exact_match(answers: list[dict[str, str | bool]]) -> float:
    """The share of answers that are right to the letter."""
    return sum(bool(answer["match"]) for answer in answers) / len(answers)


def question(prompt: str) -> str:
    """The user's words in a rendered prompt."""
    words = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return words.replace("\n", "  ")


def show(before: list[dict[str, str | bool]], after: list[dict[str, str | bool]]) -> None:
    """The first few orders with both answers, then the figures."""
    table = Table.grid(padding=(0, 1))
    for old, new in zip(before[:NUM_SHOWN], after[:NUM_SHOWN], strict=True):
        mark, style = ("right", "green") if new["match"] else ("wrong", "red")
        table.add_row("order", Text(question(str(old["prompt"])), style="bold"))
        table.add_row("before", Text(str(old["answer"]).strip(), style="yellow"))
        table.add_row("after", Text(f"{new['answer']}  ({mark})", style=style))
        table.add_row()
    console.print()
    console.print(Panel(table, title="orders it never saw", title_align="left"))
    console.print(
        f"exact match on {len(after)} held-out orders: [yellow]{exact_match(before):.1%}[/] "
        f"before, [bold green]{exact_match(after):.1%}[/] after"
    )


def main() -> None:
    """Ask, train, ask again."""
    os.chdir(ROOT)
    start = time.monotonic()
    before, after = RUN / "generations-base.jsonl", RUN / "generations-trained.jsonl"
    surefoot("eval", RECIPE, "--model", "base", "--output", str(before))
    surefoot("train", RECIPE)
    surefoot("eval", RECIPE, "--output", str(after))
    show(generations(before), generations(after))
    console.print(f"[dim]{time.monotonic() - start:.0f} seconds. Now talk to it:[/]")
    console.print(f"  .venv/bin/surefoot chat {RUN}")
    if exact_match(generations(after)) < EXPECTED:
        raise SystemExit(f"fewer than {EXPECTED:.0%} of the answers are right")


if __name__ == "__main__":
    main()
