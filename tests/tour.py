"""The stops of docs/architecture.md: ``python tests/tour.py`` links each to its line of today."""

import ast
import re

from house import PROJECT, ROOT
from source_trees import TREES

PAGE = PROJECT / "docs" / "architecture.md"
STOP = re.compile(r"\[`([\w.]+)`\]\(\.\./src/surefoot/([\w/]+\.py)(#L\d+)?\)")
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def renewed(text):
    """The page with the path and line of every stop; a stop that moved is found by its name."""
    return STOP.sub(
        lambda stop: "[`{}`](../src/surefoot/{}#L{})".format(stop[1], *place(*stop.groups()[:2])),
        text,
    )


def place(name, path):
    """The file and line of ``module.function``, ``Class.method`` or ``function``, near ``path``."""
    places = [(file, line) for file in TREES for line in lines(name, file)]
    near = [found for found in places if found[0] == ROOT / path] or places
    if len(near) != 1:
        raise LookupError(f"docs/architecture.md: {name} is in {[str(f) for f, _ in near]}")
    ((file, line),) = near
    return file.relative_to(ROOT), line


def lines(name, file):
    """The lines on which ``file`` defines it."""
    owner, _, member = name.rpartition(".")
    body = TREES[file].body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return [n.lineno for n in node.body if isinstance(n, NAMED) and n.name == member]
    if owner not in ("", file.stem.lstrip("_")):
        return []
    return [node.lineno for node in body if isinstance(node, NAMED) and node.name == member]


def journeys():
    """Title of a section to its stops: the file of each, and its name there."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        section.splitlines()[0]: [
            (stop[2], stop[1].removeprefix(f"{stop[2].split('/')[-1][:-3].lstrip('_')}."))
            for line in section.splitlines()
            if re.match(r"\d+\. ", line)
            for stop in STOP.finditer(line)
        ]
        for section in sections
    }


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
