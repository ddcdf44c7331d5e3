"""How much code every room has, beside its budget: ``python tests/budget.py`` prints the table.

``python tests/budget.py lower`` lowers the ceilings to what the rooms have.

Code is what is neither blank nor a comment nor a docstring, in every file of ``src`` that a reader
has to know: Python, and the tables, templates and pages beside it.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent
SOURCE = PROJECT / "src" / "surefoot"
BUDGET = Path(__file__).with_name("budget.toml")
SUFFIXES = (".py", ".js", ".css", ".yaml", ".jinja", ".html")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PRIVATE = re.compile(r"(^|/)_[a-z]|^(cli|plugins)/")  # nothing may import commands and plugins


def rooms():
    """Name of a room to its ``places`` (folders and modules), ``goal`` and ``ceiling`` (lines)."""
    return tomllib.loads(BUDGET.read_text())["rooms"]


def entered():
    """The most modules that a ``run`` of two steps enters, one ``step`` of it and one ``save``."""
    return tomllib.loads(BUDGET.read_text())["entered"]


def counted(source=SOURCE):
    """Room to the lines of code that it has; a file belongs to the longest place that names it."""
    places = {place: name for name, room in rooms().items() for place in room["places"]}
    found = dict.fromkeys(rooms(), 0)
    for file in sorted(source.rglob("*")):
        if file.suffix in SUFFIXES and file.is_file():
            path = file.relative_to(source)
            names = [str(path.with_suffix("")), *map(str, path.parents)]
            found[next(places[n] for n in names if n in places)] += code_lines(file)
    return found


def code_lines(file):
    """The lines of a file that are code."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    if file.suffix != ".py":
        return sum(map(bool, lines))
    code = {n for n, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def table(source=SOURCE):
    """One line a room: what it has, its goal and its ceiling."""
    found, lines = counted(source), [f"{'room':<12}{'code':>8}{'goal':>8}{'ceiling':>9}"]
    for name, room in rooms().items():
        lines.append(f"{name:<12}{found[name]:>8}{room['goal']:>8}{room['ceiling']:>9}")
    goal, ceiling = (sum(room[key] for room in rooms().values()) for key in ("goal", "ceiling"))
    lines.append(f"{'in all':<12}{sum(found.values()):>8}{goal:>8}{ceiling:>9}")
    return "\n".join(lines)


def shape():
    """What the numbers of lines do not say: modules, those that other rooms import, imports."""
    files = sorted(SOURCE.rglob("*.py"))
    texts = {file: file.read_text() for file in files}
    num_lines = sum(len(text.splitlines()) for text in texts.values())
    imports = [
        node
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    share = sum(node.end_lineno - node.lineno + 1 for node in imports) / num_lines
    modules = [file for file in files if file.name not in ("__init__.py", "plugin.py")]
    doors = [m for m in modules if not PRIVATE.search(m.relative_to(SOURCE).as_posix())]
    small = [str(m.relative_to(SOURCE)) for m in modules if len(texts[m].splitlines()) < 60]
    return (
        f"{num_lines:,} lines of Python in {len(modules)} modules, {len(doors)} of them public; "
        f"imports are {share:.1%}\nunder 60 lines: {', '.join(small)}"
    )


def lower():
    """Lower the ceiling of every room that has less code than it may have to what it has."""
    found, lines, name = counted(), BUDGET.read_text().splitlines(), ""
    for i, line in enumerate(lines):
        if line.startswith("[rooms."):
            name = line.removeprefix("[rooms.").removesuffix("]")
        elif line.startswith("ceiling = ") and name:
            lines[i] = f"ceiling = {min(found[name], rooms()[name]['ceiling'])}"
    BUDGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["lower"]:
        lower()
    print(table(*map(Path, [] if sys.argv[1:] == ["lower"] else sys.argv[1:])))
    print(shape())
