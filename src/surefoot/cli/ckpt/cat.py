"""``surefoot ckpt cat``: the values of a tensor, or of a slice of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...checkpoint.layouts.detection import find_tensor, open_contents, shown
from ...errors import CheckpointError
from ...parallel.box import select
from ...storage.address import Address
from ..table import JSON, cell, console, dims, print_json
from .checkpoint_path import PLACE, local

if TYPE_CHECKING:
    import torch

    from ...checkpoint.looking.tensor_stats import Excerpt

_SHOWN = 1000  # values; of more, only the edges are shown
_MOST = 1_000_000  # values that --all and --json print


@click.command(context_settings={"ignore_unknown_options": True})  # a SLICE may be -1
@click.argument("checkpoint", metavar="CHECKPOINT", type=PLACE)
@click.argument("tensor")
@click.argument("where", metavar="[SLICE]", default="")
@click.option("--all", "whole", is_flag=True, help="Print every value, not just the edges.")
@JSON
def cat(checkpoint: Path | Address, tensor: str, where: str, whole: bool, as_json: bool) -> None:
    """Print the values of TENSOR in CHECKPOINT, or a SLICE of them such as '0:8' or '0, :, ::2'.

    Tensor names are those of `show --tensors`, for example optimizer/NAME.exp_avg. A SLICE has
    numpy's syntax: indices, start:stop:step and ...; negative numbers count from the end, a step
    must be positive. No other part of the file is read.
    """
    from ...checkpoint.looking.tensor_stats import excerpt
    from ...checkpoint.sources.source import FolderSource

    contents = open_contents(local(checkpoint))
    name = find_tensor(contents, tensor)
    entry = contents.tensors[name].entry
    selection = select(where, entry.shape)
    count = math.prod(selection.shape)
    if (whole or as_json) and count > _MOST:
        raise CheckpointError(
            f"{tensor}: {count:,} values are too many to print, at most {_MOST:,}; add a slice"
        )
    found = excerpt(FolderSource(contents), name, selection, _MOST if whole or as_json else _SHOWN)
    if as_json:
        facts = {"tensor": shown(name), "dtype": entry.dtype, "shape": entry.shape}
        print_json(facts | {"slice": where, "values": _plain(found.values)})
        return
    what = f"{shown(name)}  {entry.dtype} {dims(entry.shape)}"
    if where:
        what = f"{shown(name)}[{where}]  {entry.dtype} {dims(selection.shape)}"
    console().print(cell(what), style="dim", soft_wrap=True)
    click.echo(render(found))


def _plain(values: torch.Tensor) -> object:
    """Nested lists of numbers; non-finite values are text, a complex number is a pair."""
    import torch

    if not values.numel():  # the other dimensions may be of any length
        return []
    if values.is_complex():
        values = torch.view_as_real(values)
    found = values.to(torch.float64) if values.is_floating_point() else values
    return _spelled(found.tolist())


def _spelled(value: object) -> object:
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def render(found: Excerpt) -> str:
    """The values in rows, as torch prints them; ``…`` where some are omitted."""
    import torch

    values = found.values
    if not values.numel():
        return "[]"
    if values.is_floating_point():
        values = values.to(torch.float64)
    texts = [_text(value) for value in values.reshape(-1).tolist()]
    width = max(map(len, texts), default=0)
    cells = iter([text.rjust(width) for text in texts])

    def nested(dim: int) -> str:
        if dim == values.ndim:
            return next(cells)
        parts = [nested(dim + 1) for _ in range(values.shape[dim])]
        if found.is_cut[dim]:
            parts.insert(len(parts) // 2, "…")
        deeper = values.ndim - dim - 1
        between = ", " if not deeper else "," + "\n" * deeper + " " * (dim + 1)
        return f"[{_wrapped(parts, dim) if not deeper else between.join(parts)}]"

    return nested(0)


_COLUMNS = 100


def _wrapped(parts: list[str], dim: int) -> str:
    """A row of values, on several lines if it is long."""
    width = max(map(len, parts), default=0) + 2
    per_line = max(1, (_COLUMNS - dim - 2) // width)
    lines = [parts[i : i + per_line] for i in range(0, len(parts), per_line)]
    return (",\n" + " " * (dim + 1)).join(", ".join(line) for line in lines)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, complex):
        return f"{value.real:.6g}{value.imag:+.6g}j"
    return str(value)
