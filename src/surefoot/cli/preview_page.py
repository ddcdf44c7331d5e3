"""The page of a preview: examples with their masks as colors, and statistics.

It needs nothing but itself: no script and no file of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ..data.text.preview import PreviewExample, RenderedExample
from ..errors import RunError
from ..storage.files import make_folder, raising, write_aside
from ..terminal_text import visible
from ..use.data_check.figures import DatasetFigures, length_bins
from ..use.data_check.findings import findings_in

STYLE = """
:root { color-scheme: light dark; --line: #8884; --trained: #1a7f3722; --edge: #1a7f37;
  --rejected: #cf222e22; --rejected-edge: #cf222e; --dim: #6e7781; --bar: #0969da99; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: .5rem 0; }
td { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.dim { color: var(--dim); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: .8rem; font: 13px/1.6 ui-monospace, monospace; }
pre span { color: var(--dim); }
pre mark { color: inherit; background: var(--trained); border-bottom: 2px solid var(--edge); }
pre mark.rejected { background: var(--rejected); border-color: var(--rejected-edge); }
pre img { max-width: 10rem; max-height: 10rem; vertical-align: middle; }
pre b { display: block; } .legend mark { background: var(--trained); color: inherit;
  border-bottom: 2px solid var(--edge); }
.bar { display: inline-block; height: .8rem; background: var(--bar); border-radius: 2px; }
.over { background: var(--rejected-edge); opacity: .7; }
"""
LEGEND = '<p class="legend"><mark>trained</mark> &nbsp; <span class="dim">masked</span></p>'


def examples_page(datasets: Sequence[DatasetFigures], recipe: str, cutoff_len: int) -> str:
    """The examples of each dataset, then its statistics."""
    parts = [LEGEND, *(_dataset(stats, cutoff_len) for stats in datasets)]
    return _page_of(f"surefoot preview {recipe}", "\n".join(parts))


def write_page(path: Path, page: str) -> None:
    """Write a page; an old file is replaced. Raises ``RunError``: it cannot be written."""
    if path.is_dir():
        raise RunError(f"--html {path}: is a folder; expected the name of a file")
    with raising(RunError, "--html"):
        make_folder(path.absolute().parent)
        write_aside(path, page.encode(errors="replace"))


def _dataset(stats: DatasetFigures, cutoff_len: int) -> str:
    examples = "".join(_example(shown) for shown in stats.shown)
    facts = "".join(f"<li>{_text(line)}</li>" for line in _facts(stats))
    bins = length_bins(stats.lengths, cutoff_len)
    lengths = _bars(
        [(f"{b.above + 1:,} to {b.most:,}", b.count, b.most > cutoff_len) for b in bins]
    )
    return (
        f"<h2>{_text(stats.name)}</h2><ul>{facts}</ul><h3>Tokens of a sequence before truncation"
        f"</h3><p>data.cutoff_len is {cutoff_len:,}; longer sequences are red.</p>{lengths}"
        f"{examples}"
    )


def _example(shown: PreviewExample) -> str:
    sequences = "".join(f"<pre>{''.join(_parts(item))}</pre>" for item in shown.items)
    return f"<h3>{_text(shown.origin)}: {_text(shown.outcome)}</h3>{sequences}"


def _parts(item: RenderedExample) -> Iterator[str]:
    answer = None
    for part in item.parts:
        if part.answer != answer and part.answer is not None:
            yield f"<b>{_text(part.answer)}</b>"
        answer = part.answer
        kind = ' class="rejected"' if answer == "rejected" else ""
        if part.picture:
            yield f'<img src="{part.picture}" alt="">'
        words = _text(part.text)
        yield f"<mark{kind}>{words}</mark>" if part.learnt else f"<span>{words}</span>"


def _facts(stats: DatasetFigures) -> Iterator[str]:
    rows, sequences, tokens, trained, *pictures = stats.totals
    yield f"{rows}, {sequences}"
    yield f"{tokens}, {trained}"
    yield from pictures
    yield from map(str, findings_in(stats))


def _text(words: object) -> str:
    """Any text for a page: control characters are visible, and nothing is markup."""
    return escape(visible(str(words)))


def _page_of(title: str, body: str) -> str:
    """A complete page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{_text(title)}</h1>\n{body}\n</body></html>\n"
    )


def _bars(counts: list[tuple[str, int, bool]]) -> str:
    """A bar for each name and count; one that is marked has another color."""
    most = max((count for _, count, _ in counts), default=1) or 1
    rows = (
        f'<tr><td class="n">{_text(name)}</td><td><span class="bar{" over" * is_over}" '
        f'style="width:{20 * count / most:.2f}rem"></span> {count:,}</td></tr>'
        for name, count, is_over in counts
    )
    return f"<table>{''.join(rows)}</table>"
