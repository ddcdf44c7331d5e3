"""The house as the code has it: its rooms, what each is, and how many modules lie in it.

``python tests/house.py`` writes the picture that CONTRIBUTING.md shows, ``docs/img/house.svg``.
"""

import ast
from html import escape
from pathlib import Path

PROJECT = Path(__file__).parent.parent
ROOT = PROJECT / "src" / "surefoot"
PICTURE = PROJECT / "docs" / "img" / "house.svg"

# A module may import from its own folder and from lower rows; folders on one row are strangers.
ROWS = [
    ["plugins"],
    ["cli"],
    ["use"],
    ["run"],
    ["recipe"],
    ["stages", "methods"],
    ["training"],
    ["network"],
    ["data", "model", "generate", "checkpoint", "optim"],
    ["parallel"],
    ["schema"],
    ["storage"],
    ["batch", "extensions"],
    ["errors", "log", "json_lines"],
    ["terminal_text"],
]
WIDTH, HEIGHT, GAP, LINE = 1240, 46, 8, 17  # pixels


def modules(folder):
    """The modules that lie in a folder itself."""
    return sorted(f for f in folder.glob("*.py") if f.name != "__init__.py")


def rooms(folder):
    """The folders in a folder that hold modules."""
    return sorted(f for f in folder.iterdir() if (f / "__init__.py").exists())


def idea(path):
    """The first sentence of a module's docstring, or of a package's."""
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].split(": ")[0].rstrip(".")


def drawn():
    """The picture, as SVG: one row of rooms above the next, what may be imported below."""
    parts, top = [], GAP
    for row in ROWS:
        inside = {name: rooms(ROOT / name) if (ROOT / name).is_dir() else [] for name in row}
        height = HEIGHT + LINE * max(len(found) for found in inside.values())
        width = (WIDTH - GAP * (len(row) + 1)) / len(row)
        for place, name in enumerate(row):
            left = GAP + place * (width + GAP)
            parts += _room(name, inside[name], left, top, width, height)
        top += height + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
    head += 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">'
    return "\n".join([head, *parts, "</svg>", ""])


def _room(name, inside, left, top, width, height):
    path = ROOT / name
    count = len(list(path.rglob("*.py"))) - 1 - len(inside) if path.is_dir() else 1
    room = f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}" rx="6" '
    yield room + 'fill="#f6f8fa" stroke="#8c959f"/>'
    yield _text(left, top + 18, name, count, ' font-weight="bold" font-size="14"')
    fits = int((width - 20) / 7.3)
    yield _text(left, top + 35, _cut(idea(path), fits))
    for number, folder in enumerate(inside):
        yield _text(left + 8, top + 35 + LINE * (number + 1), folder.name, len(modules(folder)))


def _text(left, top, text, count=None, style=""):
    more = f' <tspan fill="#57606a">{count}</tspan>' if count is not None else ""
    return f'<text x="{left + 10:.0f}" y="{top}" fill="#1f2328"{style}>{escape(text)}{more}</text>'


def _cut(text, length):
    return text if len(text) <= length else text[: length - 1].rstrip(" ,;:") + "…"


if __name__ == "__main__":
    PICTURE.write_text(drawn())
