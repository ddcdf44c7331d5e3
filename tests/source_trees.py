"""The syntax trees of Surefoot's modules, each parsed once, when a test asks for it.

Every worker collects every test: what is parsed while a test module is imported, all of them parse.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "surefoot"


class SourceTrees(Mapping[Path, ast.Module]):
    """From the path of a module to its tree, in the order of the paths."""

    def __init__(self) -> None:
        self.paths = dict.fromkeys(sorted(SRC.rglob("*.py")))

    def __getitem__(self, path: Path) -> ast.Module:
        if path not in self.paths:
            raise KeyError(path)
        return _tree(path)

    def __contains__(self, path: object) -> bool:
        return path in self.paths

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


TREES = SourceTrees()
