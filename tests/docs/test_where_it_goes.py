"""The page about where things go names files and names that are there; so does CONTRIBUTING.md."""

import ast
import re
import statistics

import pytest
from pages import ROOT

from source_trees import SRC, TREES

PAGE, CONTRIBUTING = ROOT / "docs/where-it-goes.md", ROOT / "CONTRIBUTING.md"
CODE = re.compile(r"`([^`\n]+)`")
PLACE = re.compile(r"((?:[\w-]+/)*[\w-]+\.(?:py|md|toml|txt))(?:: (\w+(?:\.\w+)*))?")
NAMED = re.compile(r"(?:[A-Z]\w+\.)?[A-Za-z_]\w*")


def names_in(file):
    """What a module defines, and what its classes do: ``load``, ``AXES``, ``Stage.problems``."""
    for node in TREES[file].body:
        yield from _defined(node)
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            yield from (f"{node.name}.{name}" for name in _defined(member))


def _defined(node):
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    found = [getattr(target, "name", getattr(target, "id", None)) for target in targets]
    return [name for name in found if name is not None]


def places(page):
    """Each file that a page names in code, with the name that it says is there."""
    for code in CODE.findall(page.read_text()):
        if (found := PLACE.fullmatch(code)) and "_x." not in code and "/x." not in code:
            yield found[1], found[2]


@pytest.mark.parametrize("page", [PAGE, CONTRIBUTING], ids=lambda page: page.name)
def test_every_file_and_every_name_is_there(page):
    found = [*places(page)]
    assert len(found) > 10
    for path, name in found:
        file = ROOT / path if path.startswith(("tests/", "docs/")) else SRC / path
        file = file if file.exists() else ROOT / path
        assert file.exists() or list(SRC.rglob(path)), f"{path}: no such file"
        assert name is None or name in set(names_in(file)), f"{path}: defines no {name}"


def test_names_without_a_file_are_somewhere_in_the_source():
    known = {name for file in TREES for name in names_in(file)}
    known |= {name.rpartition(".")[2] for name in known}
    text = re.sub(r"`[\w/.-]+\.\w+: \w+`", "", PAGE.read_text())
    for code in CODE.findall(text):
        if NAMED.fullmatch(code) and code.lower() != code and code != "NAME":
            assert code in known, f"{code}: nothing has that name"


def test_modules_and_functions_are_as_long_as_contributing_says():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions]
    modules = [len(p.read_text().splitlines()) for p in TREES if p.name != "__init__.py"]
    text = CONTRIBUTING.read_text()
    assert f"Half of all functions have at most {statistics.median(lengths):.0f} lines" in text
    assert "half of them have\n  more than 200 lines" in text and statistics.median(modules) > 200
    assert sum(length > 450 for length in modules) < len(modules) / 10
