"""Python files that a recipe names: checked before anything slow, and recorded by their hashes."""

from __future__ import annotations

import ast
import inspect
import json
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from .. import schema
from ..data.example import Example
from ..data.rows.catalog import training_examples
from ..data.section import DataSection
from ..errors import RunError, SurefootError
from ..schema.locations import FunctionPath
from ..storage import files
from ..storage.files import read_json
from ..training.rewards import FunctionReward, RewardProcess
from .from_python import AS_IN_THE_RECIPE, GIVEN, StageParts

logger = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parent.parent
NAME = "code.json"  # in a checkpoint: the functions of the recipe, and the hashes of their files


def code_of(
    section: object, callbacks: Sequence[object], parts: StageParts = AS_IN_THE_RECIPE
) -> dict[str, bytes]:
    """The file that records the functions in a recipe or section, ``callbacks``, and the functions
    of ``parts``, with the modules from their folders that they import, if there are some. None is
    run. Raises ``RunError``."""
    digests = parts.code()
    for path in functions_in(section):
        digests[str(path)] = _hash(path.file)
        digests |= {str(file): _hash(file) for file in _modules(path.file)[1:]}
    for callback in callbacks:
        with suppress(OSError, TypeError):  # typed at a prompt
            file = Path(inspect.getfile(type(callback)))
            # Of what is installed, the version tells, and an upgrade is not another run.
            if "site-packages" not in file.parts and not file.is_relative_to(_PACKAGE):
                digests |= {str(each): _hash(each) for each in _modules(file)}
    return {NAME: json.dumps(digests, indent=2, sort_keys=True).encode()} if digests else {}


def _modules(given: Path) -> list[Path]:
    """The file ``given``, and those that it imports from its folder or from the current one, inside
    of functions, too."""
    roots, found, todo = (given.parent, Path.cwd()), dict[Path, None](), [given]
    while todo:
        file = todo.pop()
        if file in found or not file.is_file():
            continue
        found[file] = None
        tree = ast.Module([], [])
        # said where it is run; the last two are of brackets in brackets
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(files.read_file(file))
        for node in ast.walk(tree):
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            for parts in _names(node):
                for root in (file.parents[level - 1],) if level else roots:
                    places = [root.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
                    todo += [place.with_name(f"{place.name}.py") for place in places]
                    todo += [place / "__init__.py" for place in places]
    return [*found]


def _names(node: ast.AST) -> Iterator[list[str]]:
    """The modules that a statement imports, or may import, by the parts of their names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        before = node.module.split(".") if node.module else []
        yield from ([*before, alias.name] for alias in node.names)


def check_functions(section: object) -> None:
    """Run the files of all functions in a recipe, each once. Raises ``RunError`` if one is not
    defined."""
    with closing(RewardProcess()) as process:
        _check(section, process)


def try_rewards(stage: Any, data: DataSection, section: object) -> None:
    """Let the stage try what is a user's on its first rows: what is wrong with it, and with the
    columns that it takes, is seen before a model is loaded. The files of all functions in
    ``section``, which is the recipe, are run once. Raises ``RunError``."""
    # In a process of its own, which is ended when it is late: a reward that hangs would hang the
    # run, and on several ranks the message would be the timeout of another one
    # (docs/decisions/0052). Nor does what a trial does to a file's state reach the run.
    with closing(RewardProcess()) as process, closing(_first_examples(data)) as examples:
        _check(section, process)
        stage.try_out(examples, process)


def _check(section: object, process: RewardProcess) -> None:
    for path in functions_in(section):
        process.check(FunctionReward(path=path).task)


def _first_examples(data: DataSection) -> Generator[Example]:
    with suppress(SurefootError):  # said when all datasets are opened
        yield from training_examples(data)


def functions_in(section: object) -> Iterator[FunctionPath]:
    """Every function that a section and its variants name."""
    cls: type = type(section)
    for name in schema.settings(cls):
        value = getattr(section, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, FunctionPath):
                yield part
            elif schema.is_section(part):
                yield from functions_in(part)


def check_code(code: Mapping[str, bytes], folder: Path) -> None:
    """Warn if a function has changed since the checkpoint in ``folder`` was saved. Raises
    ``RunError`` if one that the run was trained with is not given any more."""
    path = folder / NAME
    before = read_json(path) if path.is_file() else {}
    now = json.loads(code.get(NAME, b"{}"))
    for role in GIVEN:
        if role in before and role not in now:
            raise RunError(
                f"{folder.name} was trained with a {role} which is missing here; resume it from "
                "Python with the same `parts`"
            )
    for name, digest in now.items():
        # By the last part of its name where the folder has moved.
        moved = [d for known, d in before.items() if Path(known).name == Path(name).name]
        if digest not in ([before[name]] if name in before else moved or [digest]):
            logger.warning("%s has changed since %s was saved", name, folder.name)


def _hash(file: Path) -> str:
    with files.raising(RunError, f"{file}: cannot read the file"):
        return files.digest(files.read_file(file))
