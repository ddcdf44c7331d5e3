"""How commands show what they have found: tables, frames, figures, JSON, and bars."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ..checkpoint.layouts.detection import names_save
from ..storage.remote import Address, is_address
from ..terminal_text import one_line, plain

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_PIPE_WIDTH = 240
_UNLIMITED = 100_000  # columns
_NAME = 44  # characters of a name for which columns are given up

Advance = Callable[[int], None]


def console() -> Console:
    """The terminal as it is; a file or a pipe gets whole lines, to search and cut."""
    terminal = Console(markup=False, highlight=False)
    if terminal.is_terminal:
        return terminal
    return Console(markup=False, width=_PIPE_WIDTH, highlight=False)


@contextmanager
def reading(what: str, total: int | None) -> Iterator[Advance]:
    """A bar on standard error while bytes are read, if that is a terminal; it leaves nothing."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    screen = Console(markup=False, stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def progress(title: str, total: int, *, is_shown: bool = True) -> Iterator[Advance]:
    """A bar for work of known length, if standard error is a terminal; it leaves nothing."""
    screen = Console(markup=False, stderr=True)
    is_off = not (is_shown and screen.is_terminal)
    with Progress(console=screen, transient=True, disable=is_off) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    """An open table; ``numbers`` are the columns of figures."""
    rich_table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_last = name == columns[-1]
        rich_table.add_column(
            name, justify="right" if name in numbers else "left", no_wrap=not is_last
        )
    return rich_table


def frame(title: object, facts: Iterable[tuple[str, object]]) -> Panel:
    """Names and values in a frame."""
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(name, style="dim"), cell(value))
    return Panel(grid, title=cell(title), title_align="left", border_style="dim", expand=False)


def fitted(
    screen: Console,
    columns: Mapping[str, Sequence[Text]],
    *,
    numbers: Iterable[str] = (),
    optional: Iterable[str] = (),
    styles: Sequence[str] = (),
) -> Table:
    """A table that fits the screen: long names in its first column lose their beginnings, then
    ``optional`` columns go. ``styles`` are those of the rows."""
    left, unlimited = dict(columns), screen.options.update(max_width=_UNLIMITED)
    for dropped in (None, *optional):
        left = {name: cells for name, cells in left.items() if name != dropped}
        rich_table = _filled(left, numbers, styles)
        excess = screen.measure(rich_table, options=unlimited).maximum - screen.width
        if excess <= 0:
            return rich_table
        first = next(iter(left))
        room = max((len(text) for text in left[first]), default=0) - excess
        if room >= _NAME:
            break
    left[first] = [_cropped(text, max(room, _NAME // 2)) for text in left[first]]
    return _filled(left, numbers, styles)


def _filled(
    columns: Mapping[str, Sequence[Text]], numbers: Iterable[str], styles: Sequence[str]
) -> Table:
    rich_table = table(*columns, numbers=numbers)
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        rich_table.add_row(*row, style=styles[i] if styles else "")
    return rich_table


def _cropped(name: Text, room: int) -> Text:
    """The end of a name, which tells more than its beginning."""
    return name if len(name) <= room else Text(f"…{name.plain[len(name) - room + 1 :]}")


def cell(value: object) -> Text:
    """Any text as it is: no markup, and nothing in it that a terminal could act on."""
    return Text(one_line(str(value)))


def mark(sign: str, style: str, text: str) -> Text:
    """A line that begins with a coloured sign."""
    return Text.assemble((f"{sign} ", style), cell(text))


def number(value: float | None) -> str:
    """Four digits, as losses and norms are read."""
    return "" if value is None else f"{value:.4g}"


def dims(shape: Iterable[int] | None) -> str:
    """A shape as people write it."""
    return "" if shape is None else " × ".join(map(str, shape)) or "scalar"


def time(created: str | None) -> str:
    """Local date and time; the text itself if it is no time."""
    try:
        return f"{datetime.fromisoformat(created or '').astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return created or ""


def as_dict(value: object) -> dict[str, object]:
    """The fields of a dataclass."""
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    return dataclasses.asdict(value)


def print_json(value: object) -> None:
    """Strict JSON; what is not a finite number is null."""
    click.echo(json.dumps(plain(value), indent=2, default=str, allow_nan=False))


class CheckpointPath(click.Path):
    """An existing folder, or a URL; a file may select one save of its folder."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(  # type: ignore[override]
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | Address:
        """The folder, or the address."""
        if Path(value).is_file() and names_save(Path(value)):
            return Path(value)
        if not is_address(value):
            path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
            return path
        try:
            return Address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PLACE = CheckpointPath()


def local(checkpoint: Path | Address) -> Path:
    """The checkpoint's folder; for a URL, that of its copy in the cache."""
    if isinstance(checkpoint, Path):
        return checkpoint
    from ..checkpoint.remote import stores

    return stores().fetch(checkpoint)
