"""Figures of the source: sizes of files and functions, modules of a folder, imports of a module.

python benchmarks/house.py [SRC]
"""

import ast
import sys
import tokenize
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parent.parent / "src" / "surefoot"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def imported(root, file, node):
    """The modules of the package that a relative import names."""
    if not isinstance(node, ast.ImportFrom) or not node.level:
        return set()
    folder = file.parents[node.level - 1]
    base = folder.joinpath(*node.module.split(".")) if node.module else folder
    found = set()
    for alias in node.names:
        places = [base / alias.name, base]
        files = [f for p in places for f in (p.with_suffix(".py"), p / "__init__.py")]
        found.update([f for f in files if f.exists()][:1])
    return found - {file, root / "__init__.py"}


def main(root):
    """Print one figure a line."""
    trees = {f: ast.parse(f.read_text()) for f in sorted(root.rglob("*.py"))}
    lines = {f: len(f.read_text().splitlines()) for f in trees}
    comments = sum(map(_comments, trees))
    nodes = {f: list(ast.walk(tree)) for f, tree in trees.items()}
    functions = [n for found in nodes.values() for n in found if isinstance(n, FUNCTIONS)]
    lengths = [n.end_lineno - n.lineno + 1 for n in functions]
    imports = {f: {t for n in nodes[f] for t in imported(root, f, n)} for f in trees}
    folders = {}
    for file in trees:
        if file.name != "__init__.py":
            folders[file.parent] = folders.get(file.parent, 0) + 1
    crowded = max(folders, key=folders.get)
    wide = max(imports, key=lambda f: len(imports[f]))
    knows = [f for f in trees if any(_names_recipe(n) for n in nodes[f])]
    print(f"files: {len(trees)}")
    print(f"lines: {sum(lines.values()):,}")
    print(f"longest file: {max(lines.values())}")
    print(
        f"function, median / 95th of 100 / longest: {median(lengths):.0f} / "
        f"{quantiles(lengths, n=100)[94]:.0f} / {max(lengths)}"
    )
    print(f"comment lines: {100 * comments / sum(lines.values()):.1f} %")
    print(f"most modules in a folder: {folders[crowded]} ({crowded.relative_to(root)})")
    print(f"most imports of our own: {len(imports[wide])} ({wide.relative_to(root)})")
    print(f"modules that import Recipe: {len(knows)}")


def _comments(file):
    """Lines of a file that contain a comment."""
    with file.open("rb") as lines:
        return sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(lines.readline))


def _names_recipe(node):
    return isinstance(node, ast.ImportFrom) and any(a.name == "Recipe" for a in node.names)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
