"""Pages of HTML that need nothing but themselves: no script and no file of others."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ...errors import RunError
from ...storage.files import make_folder, raising, write_aside
from ...terminal_text import visible

STYLE = """
:root { color-scheme: light dark; --line: #8884; --trained: #1a7f3722; --edge: #1a7f37;
  --rejected: #cf222e22; --rejected-edge: #cf222e; --dim: #6e7781; --bar: #0969da99; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.dim { color: var(--dim); } .problem { color: var(--rejected-edge); font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: .8rem; font: 13px/1.6 ui-monospace, monospace; }
pre span { color: var(--dim); }
pre mark { color: inherit; background: var(--trained); border-bottom: 2px solid var(--edge); }
pre mark.rejected { background: var(--rejected); border-color: var(--rejected-edge); }
pre b { display: block; } .legend mark { background: var(--trained); color: inherit;
  border-bottom: 2px solid var(--edge); }
.bar { display: inline-block; height: .8rem; background: var(--bar); border-radius: 2px; }
.over { background: var(--rejected-edge); opacity: .7; }
"""


def text(words: object) -> str:
    """Any text for a page: control characters are visible, and nothing is markup."""
    return escape(visible(str(words)))


def page_of(title: str, body: str) -> str:
    """A complete page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{text(title)}</h1>\n{body}\n</body></html>\n"
    )


def write_page(path: Path, page: str) -> None:
    """Write a page; an old file is replaced. Raises ``RunError``: it cannot be written."""
    if path.is_dir():
        raise RunError(f"--html {path}: is a folder; expected the name of a file")
    with raising(RunError, "--html"):
        make_folder(path.absolute().parent)
        write_aside(path, page.encode(errors="replace"))


def bars(counts: list[tuple[str, int, bool]]) -> str:
    """A bar for each name and count; one that is marked has another color."""
    most = max((count for _, count, _ in counts), default=1) or 1
    rows = (
        f'<tr><td class="n">{text(name)}</td><td><span class="bar{" over" * is_over}" '
        f'style="width:{20 * count / most:.2f}rem"></span> {count:,}</td></tr>'
        for name, count, is_over in counts
    )
    return f"<table>{''.join(rows)}</table>"
