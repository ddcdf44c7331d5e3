"""The files and command lines of other programs as recipes. Plugins name the programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..errors import RecipeError
from ..extensions import Extended
from ..schema import Problem
from .files import SUFFIXES, read_text
from .overrides import Overrides
from .yaml import Document, parse

if TYPE_CHECKING:
    from ..training.callback import TrainerCallback, TrainerState
    from .recipe import Recipe


class RunExtras:
    """What a file asks of `surefoot train` and `eval` beside its recipe; by default nothing."""

    trains: bool = True
    """Whether it is trained at all; otherwise it is evaluated."""

    def check(self) -> None:
        """Raise what would fail after the run."""

    def callbacks(self, recipe: Recipe) -> Sequence[TrainerCallback]:
        """Observers of the run, on its main rank."""
        return ()

    def finish(self, recipe: Recipe, state: TrainerState) -> None:
        """Called on the main rank when the last step is saved."""

    def after_run(self, recipe: Recipe) -> None:
        """Called at the end of the command."""

    def evaluate(self, recipe: Recipe, model: str | None) -> bool:
        """Evaluate ``model`` (None: the trained one); return whether the file requests that."""
        return False


@dataclass(frozen=True)
class ConvertedFile:
    """The file of another program as a recipe."""

    title: str  # the program, for people
    document: Document  # the recipe's sections, whose errors name the lines of the original
    notes: Sequence[str] = ()  # what differs, what its data sets need beside it, what is not used
    extras: RunExtras = RunExtras()
    is_complete: bool = True  # whether it names all that a run needs


class Importer(ABC):
    """A program whose files can be converted."""

    title: ClassVar[str]
    """The program, for people; empty for one whose files are refused."""

    @abstractmethod
    def recognise(self, data: Mapping[str, object]) -> bool:
        """Whether a file with this content is the program's."""

    @abstractmethod
    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """The recipe of ``document``; ``overrides`` win. Raises ``RecipeError``: a key cannot be
        had here, with line, reason and way out."""

    def read_words(self, words: Sequence[str]) -> tuple[Document, list[str]] | None:
        """The document and the overrides of a command line without a file; None if it reads no
        such lines."""
        return None


IMPORTERS: Mapping[str, Importer] = Extended("importers", {})


def importer_of(document: Document) -> Importer | None:
    """The importer that knows ``document``; None for a recipe, and if none does."""
    data = document.data
    if not isinstance(data, Mapping) or {"model", "data", "train"} <= data.keys():
        return None
    return next((each for each in IMPORTERS.values() if each.recognise(data)), None)


def convert(words: Sequence[str], program: str | None = None) -> ConvertedFile | None:
    """The recipe of another program's ``FILE key=value ...`` or ``--key value ...``; None if the
    words are not another program's. ``program`` says whose file it is, if its content does not.
    Raises ``RecipeError``: it cannot be read or converted."""
    if words[0].startswith("--"):
        lines = ((importer, importer.read_words(words)) for importer in IMPORTERS.values())
        return next((importer.convert(*read) for importer, read in lines if read), None)
    path = Path(words[0])
    if program is None and not (path.suffix in SUFFIXES and path.is_file()):
        return None
    document = parse(read_text(path), words[0])
    if program is not None and program not in IMPORTERS:
        known = ", ".join(name for name, importer in IMPORTERS.items() if importer.title)
        raise RecipeError(f"--from {program}: expected one of {known}")
    importer = IMPORTERS[program] if program is not None else importer_of(document)
    return None if importer is None else importer.convert(document, words[1:])


def unknown(path: Path) -> RecipeError:
    """The error for the file ``path``, which no program is known to have written."""
    document = parse(read_text(path), str(path))
    message = "this is a recipe already; `surefoot recipe show` prints all its settings"
    if not isinstance(document.data, Mapping) or not {"model", "data"} <= document.data.keys():
        titles = ", ".join(each.title for each in IMPORTERS.values() if each.title)
        message = f"this is a file of none of {titles}; --from NAME says whose it is"
    return document.error([Problem((), message)])
