"""``surefoot ckpt show``: the contents of a folder of weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...checkpoint.layouts import LAYOUTS
from ...checkpoint.layouts.detection import open_contents, shown, states_of
from ...checkpoint.looking.summary import Group, Summary, Tensor, summarise
from ...errors import CheckpointError
from ...storage.address import Address
from ...terminal_text import one_line
from ..table import (
    JSON,
    as_dict,
    cell,
    console,
    dims,
    fitted,
    frame,
    in_bytes,
    number,
    print_json,
    reading,
    table,
    when,
)
from .checkpoint_path import PLACE, local

if TYPE_CHECKING:
    from ...checkpoint.looking.tensor_stats import Norms

_NUMBERS = ("tensors", "elements", "size", "L2 norm", "min", "max", "mean", "NaN", "inf")
AllNorms = Mapping[str, "Norms"]  # by a tensor's full name


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT", type=PLACE)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option(
    "--norms", is_flag=True, help="List them with L2 norm, minimum, maximum, mean, NaN, inf."
)
@click.option("--state", metavar="NAME", help="Print a state in full, as it is stored.")
@JSON
def show(
    checkpoint: Path | Address, tensors: bool, norms: bool, state: str | None, as_json: bool
) -> None:
    """Show the contents of CHECKPOINT: of Surefoot, Hugging Face, its Trainer, PEFT or MindSpore.

    Norms are those of the finite values, in 64 bits, and need little memory. Pickled files are
    listed, but never read.
    """
    checkpoint = local(checkpoint)
    if state is not None:
        print_json(_state(checkpoint, state))
        return
    summary = summarise(checkpoint)
    found = _norms(checkpoint) if norms else {}
    if as_json:
        print_json(_as_json(summary, found))
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
        screen.print(_tensors_table(summary.groups, found, screen))


def _state(checkpoint: Path, name: str) -> object:
    states = states_of(checkpoint)
    if name in states:
        return states[name]
    if not states:
        raise CheckpointError(f"{checkpoint}: it contains no states, so no {name!r}")
    near = difflib.get_close_matches(name, states, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(states))}"
    raise CheckpointError(f"{checkpoint}: it contains no state {name!r}; {hint}")


def _norms(checkpoint: Path) -> AllNorms:
    from ...checkpoint.looking.tensor_stats import norms
    from ...checkpoint.sources.source import FolderSource

    contents = open_contents(checkpoint)
    total = sum(place.entry.num_bytes for place in contents.tensors.values())
    source, found = FolderSource(contents), {}
    with reading("reading", total) as advance:
        for name, place in contents.tensors.items():
            found[name] = norms(source, name)
            advance(place.entry.num_bytes)
    return found


def _as_json(summary: Summary, found: AllNorms) -> dict[str, object]:
    def norms(group: Group, tensor: Tensor) -> dict[str, object]:
        own = found.get(f"{group.role}/{tensor.name}")
        return {"norms": as_dict(own)} if own else {}

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
        yield name, when(value) if name == "saved" else value
    yield "tensors", in_bytes(sum(group.num_bytes for group in summary.groups))


def _groups_table(groups: Iterable[Group]) -> Table:
    made = table("", "tensors", "elements", "size", "types", numbers=_NUMBERS)
    for group in groups:
        types = ", ".join(f"{name} ({count:,})" for name, count in group.dtypes.items())
        made.add_row(
            cell(group.role),
            f"{len(group.tensors):,}",
            f"{group.num_elements:,}",
            in_bytes(group.num_bytes),
            types,
        )
    return made


def _tensors_table(groups: Iterable[Group], found: AllNorms, screen: Console) -> Table:
    known = [(group.role, tensor) for group in groups for tensor in group.tensors]
    columns = {
        "tensor": [cell(shown(f"{role}/{tensor.name}")) for role, tensor in known],
        "type": [Text(tensor.dtype) for _, tensor in known],
        "shape": [Text(dims(tensor.shape)) for _, tensor in known],
    }
    if found:
        columns |= _figures([found[f"{role}/{tensor.name}"] for role, tensor in known])
    else:
        columns["size"] = [Text(in_bytes(tensor.num_bytes)) for _, tensor in known]
        columns["file"] = [cell(tensor.file) for _, tensor in known]
    return fitted(screen, columns, numbers=_NUMBERS, optional=("file", "size", "type"))


def _figures(all_norms: Sequence[Norms]) -> dict[str, list[Text]]:
    found = {
        "L2 norm": [Text(number(norms.l2)) for norms in all_norms],
        "min": [Text(number(norms.minimum)) for norms in all_norms],
        "max": [Text(number(norms.maximum)) for norms in all_norms],
        "mean": [Text(number(norms.mean)) for norms in all_norms],
        "NaN": [_alarm(norms.num_nan) for norms in all_norms],
        "inf": [_alarm(norms.num_inf) for norms in all_norms],
    }
    return {name: cells for name, cells in found.items() if any(cells)}


def _alarm(count: int) -> Text:
    return Text(f"{count:,}" if count else "", style="bold red")


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    made = table(title, "")
    for name, value in pairs:
        made.add_row(cell(name), Text(one_line(value), style="dim"))
    return made
