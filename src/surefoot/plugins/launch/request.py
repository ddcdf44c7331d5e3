"""What a user wants to run on an engine, and what is refused before the engine hears of it: a job
that waits three hours in a queue and then fails at a typing error is what users remember."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...data.order.micro_batches import check_divides
from ...data.rows.catalog import problems_of
from ...errors import DataError, RecipeError, RunError, counted, similar
from ...recipe.recipe import Recipe
from ...recipe.recipe_data import find_base, with_batch_sizes
from ...run.code_files import check_functions
from ...run.resolving import resolved

SHUTDOWN = 240  # seconds that torchrun gives its ranks to save; its default of 30 is too few


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One run on an engine, as plain values."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    name: str
    output_dir: str
    cache_dir: str | None = None  # of a run whose output_dir is a URL
    nodes: int = 1
    min_nodes: int | None = None  # fewer than ``nodes``, if the engine may change their number
    gpus: int = 0  # of each node
    ranks_per_node: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)  # of the engine

    @property
    def words(self) -> list[str]:
        """What follows ``surefoot train``."""
        return [str(self.recipe), *self.overrides]

    @property
    def run_folder(self) -> str | None:
        """The local folder of the run; None if it is in the cache folder of the user."""
        return self.cache_dir if "://" in self.output_dir else self.output_dir

    @property
    def sizes(self) -> range:
        """All numbers of ranks that the run may get."""
        least, most = self.min_nodes or self.nodes, self.nodes
        return range(least * self.ranks_per_node, most * self.ranks_per_node + 1)

    def setting(self, key: str, default: str | None = None, why: str = "") -> str:
        """The value of ``--set``. Raises ``RunError`` if there is none, and no default."""
        value = self.settings.get(key) or default
        if value is None:
            raise RunError(f"--set {key}=... is missing: {why}")
        return value

    def number(self, key: str, default: int, least: int = 0) -> int:
        """The same for a number. Raises ``RunError`` if it is none, or less than ``least``."""
        text = self.settings.get(key, str(default))
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise RunError(f"--set {key}: expected a whole number from {least}, got {text!r}")
        return int(text)

    def __str__(self) -> str:
        sizes, fewest = self.sizes, self.min_nodes or self.nodes
        nodes = counted(self.nodes, "node")
        nodes = nodes if fewest == self.nodes else f"{fewest} to {nodes}"
        gpus = f" with {counted(self.gpus, 'GPU')} each" if self.gpus else " without GPUs"
        ranks = counted(sizes[-1], "rank")
        return f"{nodes}{gpus}, {ranks if len(sizes) == 1 else f'{sizes[0]} to {ranks}'}"


def job_name(text: str) -> str:
    """``text`` as a name that every engine accepts: lowercase letters, digits, ``-``. 40 characters
    leave room for what Kubernetes appends to them in the names of pods (63 at most)."""
    name = "-".join(re.findall("[a-z0-9]+", text.lower()))
    return (name if name[:1].isalpha() else f"run-{name}")[:40].strip("-")


def read_settings(words: Sequence[str], allowed: Collection[str] | None) -> dict[str, str]:
    """``KEY=VALUE`` of each ``--set``; ``allowed``: all keys that the engine has, None if its own
    program knows them. Raises ``RunError``."""
    settings = dict[str, str]()
    for word in words:
        key, _, value = word.partition("=")
        if not re.fullmatch("[a-z][a-z0-9_-]+", key):
            raise RunError(f"--set {word!r}: expected KEY=VALUE, with the long name of a setting")
        if allowed is not None and key not in allowed:
            near = similar(key, allowed)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(allowed)}"
            raise RunError(f"--set {key}: no such setting; {hint}")
        if key in settings:
            raise RunError(f"--set {key}: occurs twice")
        settings[key] = value
        lines = value.split("\n") if key == "setup" else [value]
        if not all(line.isprintable() for line in lines):
            raise RunError(f"--set {key}: a control character in {value!r}")
    return settings


def check_ranks(recipe: Recipe, request: LaunchRequest) -> None:
    """Raise what the ranks would raise of the mesh and the batch sizes, for every number of them
    that the engine may start."""
    batches = dict[int, int]()
    num_processes = recipe.parallel.num_processes
    for size in request.sizes:
        if num_processes not in (None, size, request.ranks_per_node):
            raise RunError(
                f"parallel.num_processes: {num_processes}, but {request}; leave it unset, or "
                "change --nodes or --gpus"
            )
        try:
            num_shares = recipe.parallel.num_data_ranks(size)
        except ValueError as error:
            raise RunError(
                f"parallel: {error}; change --nodes or --gpus, or leave parallel.dp_shard unset"
            ) from None
        train = with_batch_sizes(recipe, num_shares)[0].train
        micro = train.micro_batch_size if isinstance(train.micro_batch_size, int) else 1
        check_divides(train.global_batch_size, micro, num_shares)
        batches[size] = train.global_batch_size
    if len(set(batches.values())) > 1:
        listed = ", ".join(f"{batch} with {counted(n, 'rank')}" for n, batch in batches.items())
        raise RecipeError(
            f"train.global_batch_size: not set, so it would be {listed}, and a run cannot change "
            "it when it resumes; set a number that all of them divide"
        )


def check_files(recipe: Recipe) -> None:
    """Raise what is missing, or broken, of the model, the datasets and the code that a recipe
    names, as seen from this machine."""
    check_functions(recipe)
    find_base(resolved(recipe), weights=False)
    if problems := problems_of(recipe.data):
        raise DataError("\n".join(problems))
