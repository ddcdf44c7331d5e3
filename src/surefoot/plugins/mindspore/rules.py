"""Rules for the keys of a YAML file of MindSpore Transformers.

A rule converts a value to dotted settings, or raises the reason why it cannot be converted. Rules
for several keys get the whole file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...parallel import sharding
from ...recipe.yaml import Document
from ...schema import Keys, Problem
from .ranks import rank_folders, root_of
from .strategy import strategy_near

Settings = Mapping[str, object]  # of a recipe, by dotted names
KeyRule = Callable[[Any], Settings]
Together = Sequence[tuple[Keys, KeyRule]]  # where a rule's error is shown, and the rule


class RefusedKeyError(Exception):
    """Why a value is rejected."""


@dataclass
class Converted:
    """The result for the file."""

    settings: dict[str, object] = field(default_factory=dict)  # dotted, as overrides are
    left: list[str] = field(default_factory=list)  # keys that were not looked at
    advice: list[str] = field(default_factory=list)  # what is to be added by hand

    def nested(self) -> dict[str, Any]:
        """The settings as sections of a recipe."""
        recipe: dict[str, Any] = {}
        for path, value in self.settings.items():
            *sections, name = path.split(".")
            inner = recipe
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        return recipe


def apply(document: Document, rules: Mapping[str, KeyRule], together: Together) -> Converted:
    """The settings of the keys of ``document``. Raises ``RecipeError``: with every unsupported key,
    each with line, reason and alternative."""
    content = document.data
    if not isinstance(content, dict):
        raise document.error([Problem((), "expected the keys of MindSpore Transformers")])
    converted, problems = Converted(), list[Problem]()
    for path, value in _keys(content):
        rule = rules.get(_name(path))
        if rule is None:
            converted.left.append(_name(path))
            continue
        try:
            converted.settings |= _applied(rule, value)
        except RefusedKeyError as error:
            problems.append(Problem(path, str(error)))
    for path, of_several in together:
        try:
            converted.settings |= _applied(of_several, content)
        except RefusedKeyError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise document.error(problems)
    return converted


def _applied(rule: KeyRule, value: Any) -> Settings:
    try:
        return rule(value)
    except (TypeError, AttributeError) as error:  # a list where there should be a name, say
        raise RefusedKeyError(f"a value of another type is expected: {error}") from None


def _keys(content: Mapping[str, Any]) -> Iterator[tuple[Keys, Any]]:
    """Every key of the top level and of the sections, with its value; callbacks by setting."""
    for key, value in content.items():
        if key == "callbacks" and isinstance(value, list):
            for i, callback in enumerate(value):
                for name, setting in callback.items() if isinstance(callback, dict) else ():
                    if name != "type":
                        yield (key, i, str(callback.get("type")), name), setting
        elif isinstance(value, dict):
            for name, setting in value.items():
                yield (key, name), setting
        else:
            yield (key,), value


def _name(path: Keys) -> str:
    """A key as in the table: a callback's by its type, not its position in the list."""
    return ".".join(str(key) for key in path if not isinstance(key, int))


def to(path: str, kind: type = object) -> KeyRule:
    """The key is the setting ``path``, of the type ``kind``."""

    def rule(value: Any) -> Settings:
        if value is None:
            return {}
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RefusedKeyError(f"expected {kind.__name__}, got {value!r}")
        return {path: value}

    return rule


def nothing(_value: Any) -> Settings:
    """The key has no counterpart and needs none."""
    return {}


def only(allowed: tuple[Any, ...], reason: str) -> KeyRule:
    """These values need no setting; any other is rejected for ``reason``."""

    def rule(value: Any) -> Settings:
        if value not in allowed:
            raise RefusedKeyError(f"{value!r}: {reason}")
        return {}

    return rule


CONVERTER = "convert it with mindspore.ckpt_to_safetensors"
_PLURAL = ("context_parallel", "expert_parallel", "seq_split_num", "micro_batch_interleave_num")
SAFETENSORS = only(("safetensors",), f"only safetensors are supported; {CONVERTER}")
UNCUT = {f"parallel_config.{n}": only((1, None), "it is not supported here") for n in _PLURAL}
AXES = ("data_parallel", "model_parallel", "pipeline_stage")


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The size of each of the ``AXES`` in a ``parallel_config``."""
    by_axis = {name: config.get(name, 1) for name in AXES}
    for name, value in by_axis.items():
        if type(value) is not int or value < 1:
            raise RefusedKeyError(f"{name} must be a whole number of at least 1, got {value!r}")
    return by_axis


def mesh(config: Mapping[str, Any], data_axis: str) -> dict[str, int]:
    """The axes of a run for a ``parallel_config``, whose ``data_parallel`` is ``data_axis``."""
    data, model, stages = (sizes(config)[name] for name in AXES)
    return dict.fromkeys(sharding.AXES, 1) | {data_axis: data, "tp": model, "pp": stages}


def reading_of(content: Mapping[str, Any], weights: str) -> Settings:
    """How the ranks in ``weights`` were sliced: as the strategy files say that are named, or, if
    they are to be loaded as they are and have none, as ``parallel_config`` slices this task."""
    root = root_of(Path(weights))
    if not weights or not rank_folders(root):
        return {}
    if strategy := content.get("src_strategy_path_or_dir"):
        return {"model.reading": {"strategy": str(strategy)}}
    config = content.get("parallel_config") or {}
    if content.get("auto_trans_ckpt") or content.get("use_parallel") is False:
        return {}  # the source has another strategy
    parts: dict[str, object] = {**sizes(config)}
    if set(parts.values()) == {1} or strategy_near(root) is not None:
        return {}
    switches = {
        "vocab_emb_dp": config.get("vocab_emb_dp"),
        "enable_parallel_optimizer": (content.get("parallel") or {}).get(
            "enable_parallel_optimizer"
        ),
    }
    parts |= {name: str(value).lower() for name, value in switches.items() if value is not None}
    text = ",".join(f"{name}={value}" for name, value in parts.items())
    return {"model.reading": {"source_parallel_config": text}}
