"""Whose a file is, by its keys; and what others call a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ...recipe.overrides import Overrides
from ...recipe.recipe import ConvertedFile, Importer, Recipe
from ...recipe.yaml import Document
from ...schema import Problem, paths
from .arguments import ARGUMENTS, Argument
from .commands import read_command_line, with_arguments
from .conversion import convert_llamafactory, convert_trainer
from .other_trainers import PROGRAMS
from .rules import Program

_HABITS = Path(__file__).with_name("hints.yaml")
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
# One of these is in every file of LLaMA-Factory that runs anything.
_SIGNS = ("model_name_or_path", "finetuning_type", "do_train", "per_device_train_batch_size")
_SHARED = set[str]().union(*(program.arguments for program in PROGRAMS.values()))
_ONLY_LLAMAFACTORY = ARGUMENTS.keys() - _SHARED | {"do_train"}


# Whose objects they are, by the name of their class.
_CLASSES = {
    "TrainingArguments": "transformers",
    "SFTConfig": "trl-sft",
    "DPOConfig": "trl-dpo",
    "KTOConfig": "trl-kto",
    "RewardConfig": "trl-reward",
    "GRPOConfig": "trl-grpo",
}


def _default(argument: Field[Any]) -> object:
    if argument.default_factory is not MISSING:
        return argument.default_factory()
    return argument.default


def programs_of(data: Mapping[str, object]) -> list[str]:
    """Whose settings these are, of ``PROGRAMS``: those that know most of the keys. None if they are
    LLaMA-Factory's."""
    counts = {
        name: len(data.keys() & program.arguments.keys()) for name, program in PROGRAMS.items()
    }
    most, theirs = max(counts.values()), len(data.keys() & ARGUMENTS.keys())
    has_shared = bool(data.keys() & PROGRAMS["transformers"].arguments.keys())
    is_shared = has_shared and not data.keys() & _ONLY_LLAMAFACTORY
    # Half of the keys or fewer are known by chance: the names of sections, for example.
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
        """By its own table and rules. ``to_json_string`` of the arguments has ``do_train``, which
        no trainer reads, and a mask such as ``<HUB_TOKEN>`` in place of each token."""
        if isinstance(data := document.data, Mapping):
            read = {n: v for n, v in data.items() if n != "do_train" and v != f"<{n.upper()}>"}
            document = replace(document, data=read)
        return convert_trainer(self.program, document, overrides)

    def convert_object(self, arguments: object) -> ConvertedFile | None:
        """By the class: what differs from its defaults has been set. Fields that a program has
        added to the class are free values, which callbacks read."""
        names = (_CLASSES.get(cls.__name__) for cls in type(arguments).__mro__)
        if next(filter(None, names), None) != self.name or not is_dataclass(arguments):
            return None
        plain: dict[str, object] = arguments.to_dict()  # type: ignore[union-attr]
        changed = {
            each.name: plain[each.name]
            for each in fields(arguments)
            if each.init and getattr(arguments, each.name) != _default(each)
        }
        extra = {n: v for n, v in changed.items() if n not in self.program.arguments}
        known = {n: v for n, v in changed.items() if n not in extra and n != "do_train"}
        document = Document(known, type(arguments).__name__)
        return self.convert(document, {"train.extra": extra} if extra else ())


@dataclass(frozen=True)
class LlamaFactory(Importer):
    """Files and command lines of LLaMA-Factory."""

    title = "LLaMA-Factory"

    def recognise(self, data: Mapping[str, object]) -> bool:
        """By an argument that every file of it has that runs anything."""
        return any(name in data for name in _SIGNS) and not programs_of(data)

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """``overrides`` are of its arguments and of the recipe."""
        return convert_llamafactory(*with_arguments(document, overrides))

    def read_words(self, words: Sequence[str]) -> tuple[Document, list[str]] | None:
        """``--stage sft --bf16 --max_steps -1``, and overrides of a recipe's fields."""
        if any(word.partition("=")[0] == "--config" for word in words):
            return None  # it has none; other programs name their file so
        return read_command_line(words)


class Unconverted(Importer):
    """Files that are not converted: what to do instead."""

    title = ""  # of none that can be named

    def recognise(self, data: Mapping[str, object]) -> bool:
        """By keys that only these files have."""
        return _whose(data) is not None

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """Always raises ``RecipeError``, which says what to do instead."""
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
            advice = "a recipe has model, data, stage, train"
            return f"this is a file of {_OTHERS[key]}, not a recipe; {advice}"
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


@cache
def hints_by_key() -> Mapping[str, str]:
    """What other programs, and habit, call the settings of a recipe: the end of the error for an
    unknown key, by the key, or by its section and itself. Arguments with the name of a recipe's key
    at another place are omitted."""
    keys, hints = {str(path[-1]) for path in paths(Recipe)}, dict[str, str]()
    first = [PROGRAMS[name].arguments for name in ("transformers", "trl-sft")]
    others = [program.arguments for program in PROGRAMS.values()]
    for table in (*first, ARGUMENTS, *others):
        for name, argument in table.items():
            hints.setdefault(name, _hint(argument))
    habits = YAML(typ="safe").load(_HABITS)
    for reason, names in habits["reasons"].items():
        hints |= dict.fromkeys(names.split(), f"; {reason}")
    hints = {name: hint for name, hint in hints.items() if hint and name not in keys}
    for settings, names in habits["settings"].items():
        hints |= dict.fromkeys(names.split(), f" (did you mean {settings}?)")
    return hints


def _hint(argument: Argument) -> str:
    if argument.settings:
        if ARGUMENTS.get(argument.settings[0], argument) is not argument:
            return _hint(ARGUMENTS[argument.settings[0]])
        is_setting = "." in argument.settings[0]
        return f" (did you mean {' or '.join(argument.settings)}?)" if is_setting else ""
    words = {"ignored": "no setting is needed", "refused": "not supported"}.get(argument.outcome)
    return f"; {words}: {argument.says}" if words else ""
