"""What plugins add to Surefoot's lists: layouts, targets, importers, trainers, commands.

A plugin is one light module that names what it adds by strings, ``"package.module:name"``. A string
is imported when its entry is used, so that a plugin costs nothing until then. Ours are listed here,
those of others in the entry point group ``surefoot.plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from .errors import SurefootError

GROUP = "surefoot.plugins"
BUILT_IN = ("surefoot.plugins.mindspore.plugin:PLUGIN", "surefoot.interchange.plugin:PLUGIN")
T = TypeVar("T")
Named = Mapping[str, str]  # what a list calls it -> "package.module:name"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What one plugin adds to the lists."""

    name: str

    layouts: Named = field(default_factory=dict)
    """Kinds of folders of weights: a ``Layout``."""

    openers: Named = field(default_factory=dict)
    """By layout: opens its weights under Hugging Face's names, an ``Opener``."""

    reading: Named = field(default_factory=dict)
    """By layout: a dataclass of options for reading such a folder, on ``ckpt convert``."""

    targets: Named = field(default_factory=dict)
    """What ``ckpt convert --to`` writes: a ``Target``."""

    trainers: Named = field(default_factory=dict)
    """Programs whose checkpoints a run can resume from: a ``ForeignTrainer``."""

    importers: Named = field(default_factory=dict)
    """Programs whose files become recipes: an ``Importer``."""

    callbacks: Named = field(default_factory=dict)
    """Callbacks of a recipe: a ``Callback``."""

    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Commands of ``surefoot``: what it does, and the ``click.Command``."""


@cache
def plugins() -> tuple[Plugin, ...]:
    """All plugins, ours first. Raises ``SurefootError``: one cannot be imported."""
    installed = entry_points(group=GROUP)
    found = [*map(imported, BUILT_IN), *(imported(entry.value) for entry in installed)]
    return tuple(found)


def imported(place: str) -> Any:
    """What ``"package.module:name"`` names. Raises ``SurefootError``, which says who asked."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SurefootError(
            f"the plugin {place} cannot be imported ({error}); reinstall or remove the package "
            f"{module.partition('.')[0]}"
        ) from error


class Extended(Mapping[str, T], Generic[T]):
    """Our own entries, in their order, then those of plugins, each imported when it is used."""

    def __init__(
        self, kind: str, own: Mapping[str, T], made: Callable[[Any], T] | None = None
    ) -> None:
        self._kind, self._own, self._made = kind, own, made
        self._imported: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._own:
            return self._own[name]
        if name not in self._imported:
            value = imported(self._places()[name])
            self._imported[name] = value if self._made is None else self._made(value)
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in self._places() if name not in self._own)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _places(self) -> Named:
        return {n: p for plugin in plugins() for n, p in getattr(plugin, self._kind).items()}
