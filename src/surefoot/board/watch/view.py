"""The screen of ``surefoot watch``: a line or a few for each run, and curves below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ...terminal_text import duration, one_line
from .curves import MARKS, Curve, Picture, picture
from .watched import WatchedRun

COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue", "bright_cyan", "white")
STATES = {"running": "green", "complete": "bold", "stopped": "yellow", "failed": "bold red"}
STATES |= {"died": "bold red", "gone": "red"}
DEFAULT = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
_LEAST_HEIGHT, _LEAST_WIDTH = 4, 38  # of a picture
_LABEL = 9  # characters of the scale
Row = Mapping[str, object]


@dataclass(frozen=True)
class TerminalSize:
    """How much room there is, and for what characters."""

    width: int
    height: int
    is_plain: bool  # no Unicode


def terminal_size(console: Console, *, is_plain: bool) -> TerminalSize:
    """The screen of a terminal."""
    has_unicode = (console.encoding or "").lower().replace("-", "").startswith("utf")
    return TerminalSize(max(20, console.width), max(8, console.height), is_plain or not has_unicode)


def render(
    runs: Sequence[WatchedRun], rows: Sequence[Row], names: Sequence[str], screen: TerminalSize
) -> Text:
    """The whole screen as lines, none longer than it is wide."""
    lines: list[Text] = []
    for number, row in enumerate(rows):
        lines += _facts(row, number if len(rows) > 1 else None, screen)
    left = screen.height - len(lines) - 1
    groups = _groups(runs, names)
    columns = min(max(1, screen.width // _LEAST_WIDTH), max(1, len(groups)))
    shown = groups[: max(1, left // (_LEAST_HEIGHT + 2)) * columns]
    per_column = -(-len(shown) // columns) if shown else 1
    height = max(_LEAST_HEIGHT, min(16, left // per_column - 2))
    width = (screen.width - 2 * (columns - 1)) // columns
    for first in range(0, len(shown), columns):
        panels = [_panel(*one, width, height, screen) for one in shown[first : first + columns]]
        for parts in zip(*panels, strict=True):
            lines.append(Text("  ").join(parts))
    for line in lines:
        line.truncate(screen.width)
    return Text("\n").join(lines)


Group = tuple[str, list[tuple[int, Curve, str]]]  # a title, and curves by color and name


def _groups(runs: Sequence[WatchedRun], names: Sequence[str]) -> list[Group]:
    """The curves of each picture: those of a metric of all runs; of one run, held-out loss is in
    the picture of loss."""
    found: list[Group] = []
    for name in names:
        pairs = [(number, run.curve(name)) for number, run in enumerate(runs)]
        curves = [(number, curve, name) for number, curve in pairs if curve is not None]
        if name == "loss":
            held_out = [(n, run.curve("eval_loss")) for n, run in enumerate(runs)]
            evals = [(n, curve, "eval_loss") for n, curve in held_out if curve is not None]
            if len(runs) == 1:
                curves += [(1, curve, title) for _, curve, title in evals]
            elif evals:
                found.append(("eval_loss", evals))
                if curves:
                    found.insert(len(found) - 1, (name, curves))
                continue
        if curves:
            found.append((name, curves))
    return found


def _facts(row: Row, number: int | None, screen: TerminalSize) -> list[Text]:
    """A run in words: one line of many, more of one."""
    head = Text(no_wrap=True)
    if number is not None:
        mark = MARKS[number] if screen.is_plain else "●"
        head.append(f"{mark} ", style=COLORS[number])
    head.append(one_line(str(row["name"])), style="bold")
    head.append(f"  {row['state']}", style=STATES.get(str(row["state"]), ""))
    parts = list(_parts(row))
    if number is not None:
        head.append("".join(f"  {part}" for part in parts[:5]))
        return [head]
    if row.get("because"):
        head.append(f" ({one_line(str(row['because']))})", style="dim")
    lines, line = [head], Text(no_wrap=True)
    for part in parts:
        if line and len(line) + 2 + len(part) > screen.width:
            lines.append(line)
            line = Text(no_wrap=True)
        line.append(("  " if line else "") + part)
    if row.get("metrics_problem"):
        lines.append(Text(one_line(str(row["metrics_problem"])), style="red", no_wrap=True))
    return [*lines, line]


def _parts(row: Row) -> Iterator[str]:
    step, most = row.get("step"), row.get("max_steps")
    if isinstance(step, int):
        share = f" ({100 * step / most:.0f} %)" if isinstance(most, int) and most else ""
        yield f"step {step:,}" + (f"/{most:,}" if isinstance(most, int) else "") + share
    if isinstance(left := row.get("seconds_left"), float):
        yield f"left {duration(left)}"
    figures = {"loss": "{:.4f}", "eval_loss": "{:.4f}", "learning_rate": "{:.3g}"}
    figures |= {"grad_norm": "{:.3g}"}
    for name, form in figures.items():
        if isinstance(value := row.get(name), int | float):
            yield f"{name} {form.format(value)}"
    if isinstance(speed := row.get("speed"), int | float):
        yield f"{speed:,.0f} tok/s"
    if isinstance(memory := row.get("peak_memory"), int):
        yield f"memory {memory / 2**30:.1f} GiB"
    saved = row.get("checkpoints")
    if isinstance(saved, list) and saved:
        yield f"checkpoints {', '.join(map(str, saved[-4:]))}" + (
            f" ({len(saved)} in all)" if len(saved) > 4 else ""
        )


def _panel(
    title: str,
    curves: Sequence[tuple[int, Curve, str]],
    width: int,
    height: int,
    screen: TerminalSize,
) -> list[Text]:
    """A picture with its title above, its scale at the left and its steps below."""
    points = [curve for _, curve, _ in curves]
    made = picture(points, max(4, width - _LABEL - 1), height, is_plain=screen.is_plain)
    head = Text(no_wrap=True)
    for color, curve, name in curves if len({name for _, _, name in curves}) > 1 else ():
        head.append(f"{name} ", style=COLORS[color])
        head.append(_last(curve) + "  ")
    if not head:
        head.append(one_line(title), style="bold")
        head.append(f" {_last(points[0])}" if len(points) == 1 else "")
    if odd := sum(value is None for curve in points for value in curve.values):
        head = Text(f"({odd} not finite) ", style="bold red").append(head)
    if made is None:
        return [_fit(line, width) for line in (head, *(Text() for _ in range(height + 1)))]
    colors = [color for color, _, _ in curves]
    lines = [head, *_rows(made, colors, screen)]
    steps = f"{made.first:,.0f}", f"{made.last:,.0f}"
    gap = max(1, width - _LABEL - 1 - sum(map(len, steps)))
    lines.append(Text(" " * (_LABEL + 1) + steps[0] + " " * gap + steps[1], style="dim"))
    return [_fit(line, width) for line in lines]


def _rows(made: Picture, colors: Sequence[int], screen: TerminalSize) -> Iterator[Text]:
    bar = "|" if screen.is_plain else "│"
    for at, row in enumerate(made.rows):
        label = ""
        if at == 0:
            label = f"{made.high:.4g}"
        elif at == len(made.rows) - 1 and made.low != made.high:
            label = f"{made.low:.4g}"
        line = Text(f"{label:>{_LABEL}}{bar}", style="dim", no_wrap=True)
        for character, number in row:
            line.append(
                character, style="" if number is None else f"not dim {COLORS[colors[number]]}"
            )
        yield line


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, pad=True)
    return line


def _last(curve: Curve) -> str:
    value = next((v for v in reversed(curve.values) if v is not None), None)
    return "" if value is None else f"{value:.4g}"
