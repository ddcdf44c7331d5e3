"""Python files that a recipe names: checked before anything slow, and recorded by their hashes."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .. import schema
from ..data.example import Example
from ..data.rows.catalog import training_examples
from ..errors import RunError, SurefootError
from ..recipe.recipe import Recipe
from ..schema.locations import FunctionPath
from ..storage import files
from ..storage.files import read_json
from ..training.rewards import REWARDS, FunctionReward, RewardProcess, Texts, computed, stepped
from ..training.rollout import DatasetRow, Event
from .from_python import AS_IN_THE_RECIPE, GIVEN, StageParts

logger = logging.getLogger(__name__)
SECONDS = 60.0  # that a file may take to be run
NAME = "code.json"  # in a checkpoint: the functions of the recipe, and the hashes of their files


def code_of(recipe: Recipe, parts: StageParts = AS_IN_THE_RECIPE) -> dict[str, bytes]:
    """The file that records the functions and callbacks of ``recipe`` and of ``parts``, with the
    modules from their folders that they import, if there are some. Raises ``RunError``."""
    process, digests = RewardProcess(), parts.code()
    for path in functions_in(recipe):
        beside = process.check(FunctionReward(path=path).task, SECONDS)
        digests[str(path)] = _hash(path.file)
        digests |= {str(file): _hash(file) for file in _modules([path.file, *beside])[1:]}
    process.end()
    for callback in recipe.train.callbacks:
        with contextlib.suppress(OSError, TypeError):  # typed at a prompt
            found = _modules([Path(inspect.getfile(type(callback)))])
            digests |= {str(file): _hash(file) for file in found}
    return {NAME: json.dumps(digests, indent=2, sort_keys=True).encode()} if digests else {}


def _modules(given: Sequence[Path]) -> list[Path]:
    """The files ``given``, and those that they import from the folder of the first one or from the
    current one, inside of functions, too."""
    roots, found, todo = (given[0].parent, Path.cwd()), dict[Path, None](), [*reversed(given)]
    while todo:
        file = todo.pop()
        if file in found or not file.is_file():
            continue
        found[file] = None
        tree = ast.Module([], [])
        with contextlib.suppress(SyntaxError, ValueError):  # said where it is run
            tree = ast.parse(file.read_bytes())
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


def try_rewards(recipe: Recipe) -> None:
    """Reward two responses, those of the first rows: what is wrong with a reward, and with the
    columns that it takes, is seen before a model is loaded. An environment answers them first.
    Raises ``RunError``."""
    stage: Any = recipe.stage
    cls: type = type(stage)
    settings = schema.settings(cls)
    rewards = [
        reward.task
        for name, setting in settings.items()
        if setting.variants is REWARDS
        for reward in getattr(stage, name)
        if reward.task is not None
    ]
    examples: list[Example] = []
    with contextlib.suppress(SurefootError):  # said when all datasets are opened
        examples += islice(training_examples(recipe.data), 2) if rewards else ()
    if not examples:
        return
    rows = [DatasetRow(example.columns, example.origin) for example in examples]
    responses = _responses(examples)
    # In a process of its own, which is ended when it is late: a reward that hangs would hang the
    # run, and on several ranks the message would be the timeout of another one
    # (docs/decisions/0052).
    process, seconds = RewardProcess(), max(SECONDS, stage.reward_timeout)
    for environment in (getattr(stage, name) for name in settings):
        if isinstance(environment, FunctionPath):
            events = [Event(n, rows[n], text, True) for n, text in enumerate(responses.completions)]
            stepped(process, environment, events, seconds)
    for reward in rewards:
        computed(process, reward, responses, seconds, stage.on_reward_error)
    process.end()


def _responses(examples: Sequence[Example]) -> Texts:
    """The last response of each example, or some text where it has none, as rewards read it; there
    are no tokens yet."""
    prompts, completions = list[str](), list[str]()
    for example in examples:
        contents = [message.content for message in example.messages]
        has_response = bool(contents) and example.messages[-1].role == "assistant"
        completions.append(contents.pop() if has_response else "A response.")
        prompts.append("\n".join(contents))
    columns = dict.fromkeys(name for example in examples for name in example.columns)
    return Texts(
        prompts,
        completions,
        lengths=[1] * len(examples),
        columns={name: [example.columns.get(name) for example in examples] for name in columns},
        origins=[example.origin for example in examples],
        ids=[[0]] * len(examples),
    )


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
    return files.digest(file.read_bytes())
