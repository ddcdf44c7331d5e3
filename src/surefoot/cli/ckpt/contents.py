"""``surefoot ckpt ls`` and ``show``: the checkpoints of a run, and what is in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...checkpoint.layouts import LAYOUTS
from ...checkpoint.layouts.detection import open_contents, shown, states_of
from ...checkpoint.layouts.layout import Reading
from ...checkpoint.looking.listing import CheckpointLine, list_run, verified
from ...checkpoint.looking.summary import Group, Summary, Tensor, summarise
from ...errors import CheckpointError, similar
from ...storage.remote import Address
from ...terminal_text import in_bytes, one_line
from ..table import (
    JSON,
    PLACE,
    as_dict,
    cell,
    console,
    dims,
    fitted,
    frame,
    local,
    mark,
    number,
    print_json,
    reading,
    table,
    time,
)
from ..targets import ReadingCommand

if TYPE_CHECKING:
    from ...checkpoint.looking.diff import Norms


_NUMBERS: tuple[str, ...] = ("step", "size", "on disk", "loss", "eval loss", "parent")
_NUMBERS += ("tensors", "elements", "L2 norm", "min", "max", "mean", "NaN", "inf")
_OPTIONAL = ("parent", "kind", "layout", "step", "on disk")  # goes where there is no room
_SHARED = 0.99  # below this share of a checkpoint's size, it shares files with older ones


@click.command(cls=ReadingCommand)
@click.argument("folder", metavar="RUN", type=PLACE)
@click.option("--verify", is_flag=True, help="Verify every byte of each checkpoint.")
@JSON
def ls(folder: Path | Address, verify: bool, as_json: bool, read_as: Reading) -> None:
    """List the checkpoints of RUN, a run's folder or its URL, oldest first.

    RUN may also be a folder of the Hugging Face Trainer or MindSpore. All files must exist at full
    length. Loss is the last that was logged, eval loss that of the same step. If checkpoints share
    files, a column "on disk" shows what each adds to the older ones. The exit code is 1 if --verify
    finds a damaged one.
    """
    if isinstance(folder, Address):
        from ...checkpoint.remote import stores

        lines = stores().lines(folder, verified=verify)
    else:
        lines = list_run(folder, read_as)
        if verify:
            with reading("verifying", sum(line.num_bytes or 0 for line in lines)) as advance:
                lines = [verified(line, advance, read_as) for line in lines]
    if as_json:
        print_json([as_dict(line) for line in lines])
    elif not lines:
        click.echo(f"{folder}: no checkpoints")
    else:
        _print(lines)
    if verify and any(line.step is not None and line.problem is not None for line in lines):
        raise click.exceptions.Exit(1)


def _print(lines: list[CheckpointLine]) -> None:
    screen = console()
    screen.print(_table(lines, screen))
    for line in lines:
        if line.problem is not None:
            screen.print(mark("✗", "bold red", f"{line.path.name}: {line.problem}"), soft_wrap=True)


def _table(lines: list[CheckpointLine], screen: Console) -> Table:
    usable = [line for line in lines if line.problem is None and line.step is not None]
    newest = usable[-1] if usable else None
    columns = {name: cells for name, cells in _columns(lines, newest).items() if any(cells)}
    styles = ["bold" if line is newest else "" for line in lines]
    return fitted(screen, columns, numbers=_NUMBERS, optional=_OPTIONAL, styles=styles)


def _columns(lines: list[CheckpointLine], newest: CheckpointLine | None) -> dict[str, list[Text]]:
    shares = any(_shares(line) for line in lines)
    cells = {
        "checkpoint": [line.path.name for line in lines],
        "step": ["" if line.step is None else f"{line.step:,}" for line in lines],
        "saved": [time(line.created) for line in lines],
        "size": [in_bytes(line.num_bytes) for line in lines],
        "on disk": [in_bytes(line.disk_bytes) if shares and line.step else "" for line in lines],
        "kind": [line.kind or "" for line in lines],
        "layout": [_written_by(line.layout) for line in lines],
        "loss": [number(line.loss) for line in lines],
        "eval loss": [number(line.eval_loss) for line in lines],
        "parent": [(line.parent or "").removeprefix("checkpoint-") for line in lines],
    }
    columns = {name: [cell(text) for text in texts] for name, texts in cells.items()}
    return columns | {"state": [_line_state(line, newest) for line in lines]}


def _written_by(layout: str | None) -> str:
    """Who writes runs of this layout, if not we."""
    return "" if layout is None else LAYOUTS[layout].written_by


def _shares(line: CheckpointLine) -> bool:
    has_sizes = line.num_bytes is not None and line.disk_bytes is not None
    return has_sizes and (line.disk_bytes or 0) < _SHARED * (line.num_bytes or 0)


def _line_state(line: CheckpointLine, newest: CheckpointLine | None) -> Text:
    if line.is_being_written:
        return Text("being saved", style="yellow")
    if line.problem is not None:
        return Text("damaged" if line.step is not None else "leftover", style="red")
    words = {
        "latest": line is newest,
        "best": line.is_best,
        "verified": line.verified == "every byte",
        "no hashes": line.verified == "structure",
    }
    statuses = ", ".join(word for word, holds in words.items() if holds)
    return Text(statuses or "complete", style="green")


AllNorms = Mapping[str, "Norms"]  # by a tensor's full name


@click.command(cls=ReadingCommand)
@click.argument("checkpoint", metavar="CHECKPOINT", type=PLACE)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option(
    "--norms", is_flag=True, help="List them with L2 norm, minimum, maximum, mean, NaN, inf."
)
@click.option("--state", metavar="NAME", help="Print a state in full, as it is stored.")
@JSON
def show(
    checkpoint: Path | Address,
    tensors: bool,
    norms: bool,
    state: str | None,
    as_json: bool,
    read_as: Reading,
) -> None:
    """Show the contents of CHECKPOINT: of Surefoot, Hugging Face, its Trainer, PEFT or MindSpore.

    Norms are those of the finite values, in 64 bits, and need little memory. Pickled files are
    listed, but never read.
    """
    checkpoint = local(checkpoint)
    if state is not None:
        print_json(_state(checkpoint, state))
        return
    summary = summarise(checkpoint, read_as)
    all_norms = _norms(checkpoint, read_as) if norms else {}
    if as_json:
        print_json(_as_json(summary, all_norms))
        return
    screen = console()
    screen.print(frame(summary.path, _facts(summary)))
    screen.print(_groups_table(summary.groups))
    if summary.states:
        screen.print(_pairs("states", summary.states.items()))
    sizes = ((name, in_bytes(count)) for name, count in summary.files.items())
    screen.print(_pairs("files", sizes))
    if summary.pickles:
        names = ", ".join(summary.pickles)
        screen.print(cell(f"pickled, and not read: {names}"), style="dim", soft_wrap=True)
    if tensors or norms:
        screen.print(_tensors_table(summary.groups, all_norms, screen))


def _state(checkpoint: Path, name: str) -> object:
    states = states_of(checkpoint)
    if name in states:
        return states[name]
    if not states:
        raise CheckpointError(f"{checkpoint}: it contains no states, so no {name!r}")
    near = similar(name, states)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(states))}"
    raise CheckpointError(f"{checkpoint}: it contains no state {name!r}; {hint}")


def _norms(checkpoint: Path, read_as: Reading) -> AllNorms:
    from ...checkpoint.looking.diff import norms
    from ...checkpoint.sources import FolderSource

    contents = open_contents(checkpoint, reading=read_as)
    total = sum(place.entry.num_bytes for place in contents.tensors.values())
    source, all_norms = FolderSource(contents), {}
    with reading("reading", total) as advance:
        for name, place in contents.tensors.items():
            all_norms[name] = norms(source, name)
            advance(place.entry.num_bytes)
    return all_norms


def _as_json(summary: Summary, all_norms: AllNorms) -> dict[str, object]:
    def norms(group: Group, tensor: Tensor) -> dict[str, object]:
        tensor_norms = all_norms.get(f"{group.role}/{tensor.name}")
        return {"norms": as_dict(tensor_norms)} if tensor_norms else {}

    groups = [
        {
            "role": group.role,
            "tensors": [as_dict(tensor) | norms(group, tensor) for tensor in group.tensors],
        }
        for group in summary.groups
    ]
    return {**as_dict(summary), "groups": groups, "pickles": summary.pickles}


def _facts(summary: Summary) -> Iterator[tuple[str, object]]:
    layout = LAYOUTS[summary.layout].title + ", by the Trainer" * (
        "trainer_state" in summary.states
    )
    for name, value in {"layout": layout, **summary.facts}.items():
        yield name, time(str(value)) if name == "saved" else value
    yield "tensors", in_bytes(sum(group.num_bytes for group in summary.groups))


def _groups_table(groups: Iterable[Group]) -> Table:
    rich_table = table("", "tensors", "elements", "size", "types", numbers=_NUMBERS)
    for group in groups:
        types = ", ".join(f"{name} ({count:,})" for name, count in group.dtypes.items())
        rich_table.add_row(
            cell(group.role),
            f"{len(group.tensors):,}",
            f"{group.num_elements:,}",
            in_bytes(group.num_bytes),
            types,
        )
    return rich_table


def _tensors_table(groups: Iterable[Group], all_norms: AllNorms, screen: Console) -> Table:
    tensors = [(group.role, tensor) for group in groups for tensor in group.tensors]
    columns = {
        "tensor": [cell(shown(f"{role}/{tensor.name}")) for role, tensor in tensors],
        "type": [Text(tensor.dtype) for _, tensor in tensors],
        "shape": [Text(dims(tensor.shape)) for _, tensor in tensors],
    }
    if all_norms:
        columns |= _figures([all_norms[f"{role}/{tensor.name}"] for role, tensor in tensors])
    else:
        columns["size"] = [Text(in_bytes(tensor.num_bytes)) for _, tensor in tensors]
        columns["file"] = [cell(tensor.file) for _, tensor in tensors]
    return fitted(screen, columns, numbers=_NUMBERS, optional=("file", "size", "type"))


def _figures(all_norms: Sequence[Norms]) -> dict[str, list[Text]]:
    columns = {
        "L2 norm": [Text(number(norms.l2)) for norms in all_norms],
        "min": [Text(number(norms.minimum)) for norms in all_norms],
        "max": [Text(number(norms.maximum)) for norms in all_norms],
        "mean": [Text(number(norms.mean)) for norms in all_norms],
        "NaN": [_alarm(norms.num_nan) for norms in all_norms],
        "inf": [_alarm(norms.num_inf) for norms in all_norms],
    }
    return {name: cells for name, cells in columns.items() if any(cells)}


def _alarm(count: int) -> Text:
    return Text(f"{count:,}" if count else "", style="bold red")


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    rich_table = table(title, "")
    for name, value in pairs:
        rich_table.add_row(cell(name), Text(one_line(value), style="dim"))
    return rich_table
