"""What rewards a response: a user's function, a rule, a model or a server."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from ...batch import SCORES
from ...schema.locations import FilePath, FunctionPath, ModelPath
from ..auxiliary_model import AuxiliaryModel
from .process import RewardTask


@dataclass(frozen=True, kw_only=True)
class _Weighted:
    """What all rewards have."""

    weight: float = 1.0
    """By how much it is multiplied in the sum of all rewards."""

    @property
    def model(self) -> AuxiliaryModel | None:
        """The model that computes it."""
        return None


@dataclass(frozen=True, kw_only=True)
class FunctionReward(_Weighted):
    """A Python function. It is called with ``prompts``, ``completions`` and the columns of the
    dataset, as lists, and returns a number for each completion, or None for one that does not
    count.
    """

    path: FunctionPath
    """File and name, such as ``rewards.py:exact_match``."""

    @property
    def name(self) -> str:
        """The function's."""
        return self.path.name

    @property
    def task(self) -> RewardTask:
        """Call it."""
        return RewardTask(str(self.path), "function", {"path": str(self.path)})


@dataclass(frozen=True, kw_only=True)
class ExactMatch(_Weighted):
    """1 if the response is the text of a column, but for space around it, else 0."""

    column: str
    """The column of the dataset."""
    name = "exact_match"

    @property
    def task(self) -> RewardTask:
        """Compare."""
        return RewardTask(self.name, self.name, {"column": self.column})


@dataclass(frozen=True, kw_only=True)
class Regex(_Weighted):
    """1 if a regular expression is found in the response, else 0."""

    pattern: str
    """A regular expression of Python's; ``.`` matches line breaks, too."""
    column: str | None = None
    """A column of the dataset: what is found last (its first group, if it has one) must be the
    text of the column.
    """
    name = "regex"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from None

    @property
    def task(self) -> RewardTask:
        """Search."""
        return RewardTask(self.name, self.name, {"pattern": self.pattern, "column": self.column})


@dataclass(frozen=True, kw_only=True)
class JSONSchema(_Weighted):
    """1 if the response is JSON that a schema allows, else 0."""

    schema: FilePath
    """A file with a JSON schema."""
    name = "json_schema"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise ValueError("schema: needs the package jsonschema; install surefoot[jsonschema]")

    @property
    def task(self) -> RewardTask:
        """Validate."""
        return RewardTask(f"json_schema {self.schema}", self.name, {"schema": str(self.schema)})


@dataclass(frozen=True, kw_only=True)
class Length(_Weighted):
    """0 up to ``soft_limit`` tokens, then less, down to -1 at ``hard_limit`` (soft overlong
    punishment, arXiv:2503.14476).
    """

    soft_limit: int
    """The most tokens of a response without a punishment."""
    hard_limit: int
    """The fewest tokens with the full one."""
    name = "length"

    def __post_init__(self) -> None:
        if not 0 <= self.soft_limit < self.hard_limit:
            raise ValueError(
                f"soft_limit must be at least 0 and less than hard_limit, got {self.soft_limit} "
                f"and {self.hard_limit}"
            )

    @property
    def task(self) -> RewardTask:
        """Count."""
        limits = {"soft_limit": self.soft_limit, "hard_limit": self.hard_limit}
        return RewardTask(self.name, self.name, limits)


@dataclass(frozen=True, kw_only=True)
class RewardModel(_Weighted):
    """The score of a reward model, such as ``stage: rm`` trains, at the last token of the response.
    Its tokens must be the policy's.
    """

    path: ModelPath
    """A folder or a hub id."""
    name = "reward_model"
    task = None

    @property
    def model(self) -> AuxiliaryModel:
        """It stays in memory beside the policy."""
        return AuxiliaryModel(SCORES, self.path, "window")


@dataclass(frozen=True, kw_only=True)
class Server(_Weighted):
    """An HTTP server. It gets JSON by POST, ``{"prompts": [...], "completions": [...], "columns":
    {name: [...]}}``, and answers ``{"rewards": [...]}``.
    """

    url: str
    """Its address, such as ``http://localhost:8000/score``."""
    name = "server"

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")

    @property
    def task(self) -> RewardTask:
        """Ask it."""
        return RewardTask(self.url, self.name, {"url": self.url})
