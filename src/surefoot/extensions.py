"""What plugins add to the lists of Surefoot: stages, optimizers, layouts, targets, commands.

A plugin is one light module that names what it adds by strings, ``"package.module:name"``. A string
is imported when its entry is used, so that a plugin costs nothing until then. The bundled ones are
listed here, those of other packages in the entry point group ``surefoot.plugins``. A plugin that is
broken takes nothing with it: its entries are missing, and ``surefoot plugins`` says why. The names
that Surefoot's own packages export are imported as late, by ``lazy_getattr``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import SurefootError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "surefoot.plugins"
BUNDLED = (
    "surefoot.plugins.migrate.plugin:PLUGIN",
    "surefoot.plugins.mindspore.plugin:PLUGIN",
    "surefoot.plugins.quantize.plugin:PLUGIN",
    "surefoot.plugins.gguf.plugin:PLUGIN",
    "surefoot.plugins.sweep.plugin:PLUGIN",
    "surefoot.plugins.board.plugin:PLUGIN",
    "surefoot.plugins.serve.plugin:PLUGIN",
    "surefoot.plugins.trainers.plugin:PLUGIN",
    "surefoot.plugins.cloud.plugin:PLUGIN",
    "surefoot.plugins.launch.plugin:PLUGIN",
)
T = TypeVar("T")
Named = Mapping[str, str]  # what a list calls it -> "package.module:name"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What one plugin adds to the lists."""

    name: str

    stages: Named = field(default_factory=dict)
    """Values of ``stage`` in a recipe: a ``Stage``."""

    methods: Named = field(default_factory=dict)
    """Values of ``method``: a ``Method``."""

    optimizers: Named = field(default_factory=dict)
    """Values of ``optim``: an ``Optimizer``."""

    callbacks: Named = field(default_factory=dict)
    """Items of ``train.callbacks``: a ``TrainerCallback`` that is a dataclass of its settings."""

    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Commands of ``surefoot``: what it does, and where its ``click.Command`` is."""

    layouts: Named = field(default_factory=dict)
    """Kinds of folders of weights: a ``Layout``."""

    openers: Named = field(default_factory=dict)
    """By layout: opens its weights under Hugging Face's names, an ``Opener``."""

    pickled: Named = field(default_factory=dict)
    """Opens folders whose weights are pickles, if the user trusts them: a ``PickleOpener``."""

    reading: Named = field(default_factory=dict)
    """By layout: a dataclass of options for reading such a folder: ``LayoutOptions``."""

    targets: Named = field(default_factory=dict)
    """What ``export`` and ``ckpt convert --to`` write: a ``Target``."""

    trainers: Named = field(default_factory=dict)
    """Programs whose checkpoints a run can resume from: a ``ForeignTrainer``."""

    importers: Named = field(default_factory=dict)
    """Programs whose files become recipes: an ``Importer``."""

    hints: Named = field(default_factory=dict)
    """What other programs call settings: a function that returns what to say, by an unknown key."""

    row_files: Named = field(default_factory=dict)
    """By suffix: a function from a file of another program to its rows, for ``data convert``."""

    hubs: Named = field(default_factory=dict)
    """Values of ``model.hub`` and ``data.hub``: a ``HubClient``."""

    stores: Named = field(default_factory=dict)
    """What opens a run whose folder is a URL: ``RemoteStores``."""

    uploads: Named = field(default_factory=dict)
    """What uploads a run to a hub while it trains: a function from ``train`` to ``RunUploads``."""

    def lists(self) -> dict[str, dict[str, str]]:
        """What it adds: list -> name -> place, without the lists to which it adds nothing."""
        lists = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        lists["commands"] = {name: place for name, (_, place) in self.commands.items()}
        return {kind: dict(places) for kind, places in lists.items() if places}


@dataclass(frozen=True)
class Installed:
    """A plugin that is here, and loads or does not."""

    name: str
    source: str  # "bundled", or the package and its version
    plugin: Plugin  # without entries if it does not load
    problem: str | None = None


@cache
def installed() -> tuple[Installed, ...]:
    """All plugins, the bundled ones first."""
    from importlib.metadata import entry_points  # 45 ms, and `--help` needs none

    others = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return (*map(_bundled, BUNDLED), *map(_foreign, others))


def _bundled(place: str) -> Installed:
    plugin = imported(place)
    return Installed(plugin.name, "bundled", plugin)


@cache
def bundled_commands() -> dict[str, tuple[str, str]]:
    """The commands of the bundled plugins, as a ``Plugin`` has them; reads no entry points."""
    plugins: list[Plugin] = [imported(place) for place in BUNDLED]
    return {name: entry for plugin in plugins for name, entry in plugin.commands.items()}


def _foreign(entry: EntryPoint) -> Installed:
    source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        plugin = imported(entry.value)
        if not isinstance(plugin, Plugin):
            raise SurefootError(f"{entry.value} is no surefoot.extensions.Plugin")
    except SurefootError as error:
        return Installed(entry.name, source, Plugin(name=entry.name), str(error))
    return Installed(entry.name, source, plugin)


def imported(place: str) -> Any:
    """What ``"package.module:name"`` names. Raises ``SurefootError``: importing it fails."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a stranger's module can raise anything
        raise SurefootError(
            f"the plugin's {place} cannot be imported ({type(error).__name__}: {error}); fix or "
            f"remove the package {module.partition('.')[0]}"
        ) from error


@dataclass(frozen=True)
class Entry:
    """What one plugin adds to one list under one name."""

    name: str
    place: str
    owner: Installed


@cache
def entries(kind: str) -> dict[str, Entry]:
    """What the plugins add to a list; of two of one name the first, with a warning."""
    by_name = dict[str, Entry]()
    for owner in installed():
        for name, place in owner.plugin.lists().get(kind, {}).items():
            first = by_name.setdefault(name, Entry(name, place, owner))
            if first.owner is not owner:
                logger.warning(
                    "%s of the plugin %s's %s is skipped: the plugin %s has one of this name",
                    *(name, owner.name, kind, first.owner.name),
                )
    return by_name


class Extended(Mapping[str, T], Generic[T]):
    """The core's own entries, in their order, then those of plugins, each imported when it is used.

    Where all are looked at, one that cannot be imported is skipped with a warning; asked for by
    its name, it raises ``SurefootError``.
    """

    def __init__(self, kind: str, own: dict[str, T]) -> None:
        self.own = own  # also what a program that imports Surefoot adds
        self._kind = kind
        self._imported: dict[str, T] = {}
        self._broken: set[str] = set()

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name not in self._imported:
            self._imported[name] = imported(entries(self._kind)[name].place)
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in entries(self._kind)

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in entries(self._kind) if self._is_sound(name))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _is_sound(self, name: str) -> bool:
        """Whether it is the entry of that name, and can be imported."""
        if name not in self._broken:
            try:
                if name in self.own:
                    raise SurefootError("Surefoot itself has one of this name")
                self[name]
            except SurefootError as error:
                self._broken.add(name)
                logger.warning("%s of a plugin's %s is skipped: %s", name, self._kind, error)
        return name not in self._broken


def problems(names_of_core: Mapping[str, Collection[str]]) -> dict[tuple[str, str, str], str]:
    """Why an entry is missing, by its plugin, list and name. It imports every entry.
    ``names_of_core``: those that Surefoot itself has in a list, which a plugin cannot take."""
    reasons = {}
    for owner in installed():
        for kind, places in owner.plugin.lists().items():
            for name, place in places.items():
                taken = names_of_core.get(kind, ())
                if reason := _why_missing(entries(kind)[name], owner, place, taken):
                    reasons[owner.name, kind, name] = reason
    return reasons


def _why_missing(first: Entry, owner: Installed, place: str, taken: Collection[str]) -> str | None:
    if first.name in taken:
        return "Surefoot itself has one of this name"
    if first.owner is not owner:
        return f"the plugin {first.owner.name} has one of this name"
    try:
        imported(place)
    except SurefootError as error:
        return str(error)
    return None


def lazy_getattr(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``, which imports each public name from its module on first
    use. ``homes`` are these modules and the names each exports: so a package lists its names in one
    place, and importing one module of it does not import all the others, and torch."""
    modules = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], package), name)

    return find
