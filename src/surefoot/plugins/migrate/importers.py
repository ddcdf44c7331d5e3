"""Whose a file is, by its keys, and LLaMA-Factory's arguments on a command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import click

from ...errors import RecipeError
from ...recipe.files import SUFFIXES, read_text
from ...recipe.overrides import Overrides
from ...recipe.recipe import ConvertedFile, Importer
from ...recipe.yaml import Document, parse, parse_argument, parse_text
from ...schema import Keys, Problem
from ...terminal_text import visible
from .arguments import ARGUMENTS
from .commands import Command, command_of
from .conversion import Conversion, convert_llamafactory, convert_trainer
from .given import Program
from .programs import LLAMAFACTORY as LLAMAFACTORY_PROGRAM
from .programs import PROGRAMS

_KEY = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_LINE = "command line"
# Programs whose files are not converted, by keys that are in nobody else's.
_OTHERS = {
    "actor_rollout_ref": "verl",
    "zero_optimization": "DeepSpeed",
    "train_micro_batch_size_per_gpu": "DeepSpeed",
    "compute_environment": "Accelerate",
    "distributed_type": "Accelerate",
    "_component_": "torchtune",
}
# In every file of LLaMA-Factory's v1 is one of these, or `model` and `train_dataset` as text.
_V1 = {"init_config", "peft_config", "kernel_config", "quant_config", "dist_config"}
_V1 |= {"model_class", "sample_backend", "batching_strategy"}
_SIGNS = ("model_name_or_path", "finetuning_type", "do_train", "per_device_train_batch_size")
_SHARED = set[str]().union(*(program.arguments for program in PROGRAMS.values()))
_ONLY_LLAMAFACTORY = ARGUMENTS.keys() - _SHARED | {"do_train"}


def has_signs(data: Mapping[str, object]) -> bool:
    """Whether there is an argument that every file of LLaMA-Factory has which runs anything."""
    return any(name in data for name in _SIGNS)


def programs_of(data: Mapping[str, object]) -> list[str]:
    """Whose settings these are, of ``PROGRAMS``: those that know most of the keys. None if they are
    LLaMA-Factory's."""
    counts = {
        name: len(data.keys() & program.arguments.keys()) for name, program in PROGRAMS.items()
    }
    most, theirs = max(counts.values()), len(data.keys() & ARGUMENTS.keys())
    has_shared = bool(data.keys() & PROGRAMS["transformers"].arguments.keys())
    is_shared = has_shared and not data.keys() & _ONLY_LLAMAFACTORY
    if most < theirs or (most == theirs and not is_shared) or 2 * most <= len(data):
        return []
    return [name for name, count in counts.items() if count == most]


@dataclass(frozen=True)
class TrainerImporter(Importer):
    """A trainer of TRL, axolotl or transformers."""

    name: str
    program: Program

    @property
    def title(self) -> str:  # type: ignore[override]
        """The trainer."""
        return self.program.title

    def recognise(self, data: Mapping[str, object]) -> bool:
        """Whether this one alone knows most of the keys."""
        return programs_of(data) == [self.name]

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """By its own table and rules."""
        return convert_trainer(self.program, document, overrides)


@dataclass(frozen=True)
class LlamaFactory(Importer):
    """LLaMA-Factory."""

    title = "LLaMA-Factory"

    def recognise(self, data: Mapping[str, object]) -> bool:
        """By an argument that every file of it has that runs anything."""
        return has_signs(data) and not programs_of(data)

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """``overrides`` are of its arguments and of the recipe."""
        return convert_llamafactory(*with_arguments(document, overrides))

    def read_words(self, words: Sequence[str]) -> tuple[Document, list[str]] | None:
        """``--stage sft --bf16 --max_steps -1``, and overrides of a recipe's fields."""
        return read_command_line(words)


class Unconverted(Importer):
    """Files that are not converted: what to do instead."""

    title = ""  # of none that can be named

    def recognise(self, data: Mapping[str, object]) -> bool:
        """By keys that only these files have."""
        return _whose(data) is not None

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """Raises ``RecipeError``."""
        assert isinstance(document.data, Mapping)
        raise document.error([Problem((), _whose(document.data) or "")])


def _whose(data: Mapping[str, object]) -> str | None:
    """What to say of a file that cannot be converted; None if it is none."""
    has_text = all(isinstance(data.get(name), str) for name in ("model", "train_dataset"))
    if not isinstance(data.get("model"), dict) and (has_text or _V1 & data.keys()):
        return (
            "this is a file of LLaMA-Factory's v1 (USE_V1=1), whose arguments are not converted; "
            "write those of `llamafactory-cli train` (model_name_or_path, dataset, ...), or a "
            "recipe: docs/how-to/own-model-and-data.md"
        )
    inner = chain.from_iterable(value for value in data.values() if isinstance(value, Mapping))
    for key in (*data, *inner):
        if key in _OTHERS:
            has = "a recipe has model, data, stage, train"
            return f"this is a file of {_OTHERS[key]}, not a recipe; {has}"
    if len(names := programs_of(data)) > 1:
        return (
            "these are settings of TRL, of transformers' Trainer or of LLaMA-Factory; `surefoot "
            f"recipe convert FILE --from {'|'.join(names)}` prints them as a recipe; for "
            "LLaMA-Factory's, add do_train: true"
        )
    return None


UNCONVERTED = Unconverted()
LLAMAFACTORY = LlamaFactory()
TRL_SFT, TRL_DPO, TRL_KTO, TRL_REWARD, TRL_GRPO, TRANSFORMERS, AXOLOTL = (
    TrainerImporter(name, program) for name, program in PROGRAMS.items()
)


def read_command_line(words: Sequence[str]) -> tuple[Document, list[str]]:
    """The values by argument, and Surefoot's own overrides among them, which have a dot before
    ``=``. Raises ``RecipeError``: a value belongs to no argument, or an argument occurs twice."""
    values: dict[str, list[str]] = {}
    overrides: list[str] = []
    key = ""
    for word in words:
        if _KEY.fullmatch(word):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            if key in values:
                raise RecipeError(f"{_LINE}: --{key} occurs twice; keep one")
            values[key] = [value] if equals else []
        elif _is_override(word):
            overrides.append(word)
        elif not key or (values[key] and not _takes_several(key)):
            raise RecipeError(f"{_LINE}: {word!r} belongs to no argument; write --name value")
        else:
            values[key].append(word)
    data = {key: _value(key, words) for key, words in values.items()}
    origins: dict[Keys, str] = {(key,): f"{_LINE}: --{key}" for key in data}
    return Document(data, _LINE, overrides=origins), overrides


def _is_override(word: str) -> bool:
    """Whether a word sets a field of a recipe: ``optim.adamw.learning_rate=1e-5``."""
    path, equals, _ = word.partition("=")
    return bool(equals) and "." in path and "/" not in path


def _takes_several(key: str) -> bool:
    return key not in ARGUMENTS or ARGUMENTS[key].kind in ("list", "any")


def _value(key: str, words: Sequence[str]) -> object:
    """``--bf16`` alone is true; ``--no_NAME`` is false only as a key of its own."""
    if len(words) != 1:
        return list(words) or True
    word = words[0]
    if word.lstrip().startswith("{"):
        try:
            return json.loads(word)
        except ValueError:
            raise RecipeError(f"{_LINE}: --{key}: not valid JSON: {word}") from None
    return None if word.lower() in ("none", "null") and key != "report_to" else word


def with_arguments(document: Document, overrides: Overrides) -> tuple[Document, Overrides]:
    """``document`` with the overrides of its arguments (``learning_rate=1e-5``), and the others,
    of a recipe's fields."""
    if isinstance(overrides, Mapping):
        theirs = {key: value for key, value in overrides.items() if key in ARGUMENTS}
        others: Overrides = {k: value for k, value in overrides.items() if k not in ARGUMENTS}
    else:
        others = [word for word in overrides if not _sets_argument(word)]
        theirs = dict(_argument_of(word) for word in overrides if _sets_argument(word))
    if not theirs or not isinstance(document.data, Mapping):
        return document, others
    origins: dict[Keys, str] = {(name,): f"{_LINE}: {name}" for name in theirs}
    return (
        replace(
            document,
            data={**document.data, **theirs},
            overrides={**document.overrides, **origins},
        ),
        others,
    )


def _sets_argument(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key in ARGUMENTS


def _argument_of(word: str) -> tuple[str, object]:
    key, _, text = word.partition("=")
    if ARGUMENTS[key].kind == "text":
        return key, parse_text(text)
    return key, parse_argument(text, f"{_LINE}: {word}")[0]


def of_llamafactory(name: str, words: list[str]) -> tuple[str, ...] | None:
    """The words of the command that does what `llamafactory-cli NAME` does, which is shown; None
    if they are not LLaMA-Factory's."""
    if name in ("webui", "webchat"):  # which read no file there, either
        is_file = bool(words) and words[0].endswith(SUFFIXES)
        options = [word for word in words if word.startswith("-")] if is_file else words
        port = os.environ.get("GRADIO_SERVER_PORT")
        found: Command | None = Command(("board", *options, *(("--port", port) if port else ())))
    else:
        found = find_command(name, words)
    if found is None and name == "api":
        raise RecipeError(
            "api: no arguments of LLaMA-Factory; name its file, or use `surefoot serve MODEL`"
        )
    if found is None:
        return None
    for line in (f"runs: {found}", *(f"  differs: {note}" for note in found.notes)):
        click.echo(visible(line), err=True)
    return found.words


def find_command(
    name: str, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Command | None:
    """What `llamafactory-cli NAME FILE key=value ...` is here, with the options of Surefoot that
    follow its words; None if the words are not LLaMA-Factory's, or those of a run. Raises
    ``RecipeError``."""
    if words and words[0].startswith("--"):
        document, own = read_command_line(words)[0], list[str]()
    elif words and Path(words[0]).suffix in SUFFIXES and Path(words[0]).is_file():
        count = next((i for i, w in enumerate(words) if w.startswith("-")), len(words))
        document = parse(read_text(Path(words[0])), words[0])
        document, others = with_arguments(document, words[1:count])
        own = [*others, *words[count:]]
    else:
        return None
    data = document.data if isinstance(document.data, Mapping) else {}
    if not has_signs(data) or len(programs_of(data)) == 1:
        return None
    conversion = Conversion(document)
    given = conversion.read(LLAMAFACTORY_PROGRAM, environment)
    found = None
    with conversion.refusing():
        found = command_of(name, given)
    conversion.check()
    return None if found is None else replace(found, words=(*found.words, *own))
