"""``surefoot ckpt diff``: compare two checkpoints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...checkpoint.layouts.detection import shown
from ...checkpoint.layouts.layout import Reading
from ...checkpoint.looking.summary import PARTS, ValueChange
from ...checkpoint.state.roles import roles_of
from ...errors import counted
from ...recipe.yaml import parse
from ...storage.remote import Address
from ..table import (
    JSON,
    PLACE,
    as_dict,
    cell,
    console,
    dims,
    fitted,
    local,
    mark,
    number,
    print_json,
    reading,
    table,
)
from ..targets import ReadingCommand

if TYPE_CHECKING:
    from ...checkpoint.looking.diff import Comparison, TensorChange, TensorDifference

_LARGEST = 5  # tensors of each role, and values of each part, in the summary
_WIDTH = 60  # characters of a value


@click.command(cls=ReadingCommand)
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@click.option(
    "--only",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Compare this part only; may be given several times.",
)
@click.option(
    "--all", "everything", is_flag=True, help="List all tensors, whether they differ or are equal."
)
@JSON
def diff(
    a: Path | Address,
    b: Path | Address,
    parts: tuple[str, ...],
    everything: bool,
    as_json: bool,
    read_as: Reading,
) -> None:
    """Compare checkpoints A and B of any layout, tensor by tensor.

    Prints the largest |B - A|, the L2 norms of B - A, A and B, and "relative": the norm of B - A
    over the larger of the other two. Tensors whose hashes are equal are not read. Exit code 0: all
    is equal; 1: something differs; 2: they cannot be compared.
    """
    from ...checkpoint.looking.diff import compare

    def parsed(text: str, name: str) -> object:
        return parse(text, name).data

    a, b = local(a), local(b)
    parts = parts or PARTS
    comparison = compare(a, b, parts=parts, parse=parsed, progress=reading, reading=read_as)
    if as_json:
        print_json(_as_json(a, b, comparison))
    else:
        _print(a, b, comparison, everything=everything)
    if not comparison.is_equal:
        raise click.exceptions.Exit(1)


def _as_json(a: Path, b: Path, comparison: Comparison) -> dict[str, object]:
    tensors = []
    for tensor in comparison.tensors:
        relative = {"relative": tensor.figures.relative} if tensor.figures else {}
        row = as_dict(tensor)
        figures = row.pop("figures")
        tensors.append(row | (figures if isinstance(figures, dict) else {}) | relative)
    values = {
        part: [as_dict(change) for change in changes] for part, changes in comparison.values.items()
    }
    return {"a": a, "b": b, "equal": comparison.is_equal, "tensors": tensors, "values": values}


def _print(a: Path, b: Path, comparison: Comparison, *, everything: bool) -> None:
    screen = console()
    for letter, folder in (("A", a), ("B", b)):
        screen.print(mark(letter, "bold", str(folder)), soft_wrap=True)
    if comparison.is_equal:
        num = counted(len(comparison.tensors), "tensor")
        screen.print(
            mark("✓", "bold green", f"equal: {num}, and everything else that was compared")
        )
    if comparison.tensors and not (comparison.is_equal and not everything):
        screen.print(_counts(comparison.tensors))
    changed = [t for t in comparison.tensors if everything or t.verdict != "equal"]
    listed = changed if everything else _largest(changed)
    if listed:
        screen.print()
        screen.print(_tensors(listed, screen))
        _more(screen, len(changed) - len(listed))
    for part, changes in comparison.values.items():
        if changes:
            limit = len(changes) if everything else _LARGEST
            screen.print()
            screen.print(_values(part, changes[:limit]))
            _more(screen, len(changes) - limit)


def _more(screen: Console, left: int) -> None:
    if left > 0:
        screen.print(f"… and {left:,} more (--all lists them)", style="dim")


def _largest(changed: Sequence[TensorChange]) -> list[TensorChange]:
    """Those of each role that differ most; first what has no numbers, as it is in one alone."""
    largest = []
    for role in roles_of(tensor.name for tensor in changed):
        of_role = [tensor for tensor in changed if tensor.role == role]
        of_role.sort(key=lambda t: -t.figures.relative if t.figures else -math.inf)
        largest += of_role[:_LARGEST]
    return largest


def _counts(tensors: Sequence[TensorChange]) -> Table:
    counts = Counter((tensor.role, tensor.verdict) for tensor in tensors)
    verdicts = sorted({verdict for _, verdict in counts}, key=lambda name: (name != "equal", name))
    rich_table = table("tensors", *verdicts, numbers=verdicts)
    for role in dict.fromkeys(tensor.role for tensor in tensors):
        figures = (counts[role, verdict] for verdict in verdicts)
        rich_table.add_row(cell(role), *(f"{count:,}" if count else "" for count in figures))
    return rich_table


def _tensors(changes: Sequence[TensorChange], screen: Console) -> Table:
    columns = {
        "tensor": [cell(shown(change.name)) for change in changes],
        "verdict": [cell(_verdict(change)) for change in changes],
        "differing": [_of(change, lambda f: f"{f.num_different:,}") for change in changes],
        "relative": [_of(change, lambda f: number(f.relative)) for change in changes],
        "max |B-A|": [_of(change, lambda f: number(f.max_absolute)) for change in changes],
        "‖B-A‖": [_of(change, lambda f: number(f.norm)) for change in changes],
        "‖A‖": [_of(change, lambda f: number(f.norm_a)) for change in changes],
        "‖B‖": [_of(change, lambda f: number(f.norm_b)) for change in changes],
    }
    figures = list(columns)[2:]
    if all(text.plain == "differs" for text in columns["verdict"]):
        del columns["verdict"]
    return fitted(screen, columns, numbers=figures, optional=("‖B‖", "‖A‖", "differing", "‖B-A‖"))


def _of(change: TensorChange, say: Callable[[TensorDifference], str]) -> Text:
    return Text("" if change.figures is None else say(change.figures))


def _verdict(change: TensorChange) -> str:
    if change.verdict == "other type":
        return f"{change.types[0]} → {change.types[1]}"
    if change.verdict == "other shape":
        return f"{dims(change.shapes[0])} → {dims(change.shapes[1])}"
    if change.figures is not None and not change.figures.num_different:
        return "bits only"  # the sign of a zero, or another nan
    return change.verdict


def _values(part: str, changes: Sequence[ValueChange]) -> Table:
    rich_table = table(part, "A", "B")
    for change in changes:
        a = "" if change.what == "only in B" else _clipped(change.a)
        b = "" if change.what == "only in A" else _clipped(change.b)
        rich_table.add_row(cell(change.path), cell(a), cell(b))
    return rich_table


def _clipped(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
