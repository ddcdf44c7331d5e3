"""Options for reading a folder of another program, where its files do not say it. No torch.

How weights were sharded is a fact about their folder. A user states it in an option or a recipe,
and the folder is opened elsewhere: by a command, a resume, or as the base under an adapter. So the
process keeps the options here, by folder (docs/decisions/0089).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ...errors import CheckpointError
from ...extensions import Extended
from ...schema import Setting, settings
from ...storage import files
from .detection import detect_layout


class LayoutOptions(Protocol):
    """A dataclass of options; all are optional."""

    def fits(self, folder: Path) -> bool:
        """Whether reading ``folder`` depends on the options that are set."""


READING: Mapping[str, type] = Extended("reading", {})
"""The options of each layout."""
T = TypeVar("T")
_STATED: dict[Path, LayoutOptions] = {}


def state_options(folders: Iterable[str | Path | None], options: Mapping[str, object]) -> None:
    """Read those of ``folders`` to which they belong with ``options`` from now on, or without any.
    Raises ``CheckpointError`` if there are some, and they belong to none; or a value is invalid."""
    paths = [Path(folder).expanduser().absolute() for folder in folders if folder]
    by_folder: dict[Path, LayoutOptions] = {}
    for path in paths:
        _STATED.pop(path, None)
    paths = [path for path in paths if options and files.exists(path)]
    for path in paths:
        layout = detect_layout(path)
        kind = None if layout is None else READING.get(layout.name)
        if kind is not None and options.keys() <= (known := settings(kind)).keys():
            values = {name: parsed(known[name], value) for name, value in options.items()}
            stated = kind(**values)
            by_folder |= {path: stated} if stated.fits(path) else {}
    if paths and not by_folder:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise CheckpointError(
            f"{names}: has no effect on {', '.join(map(str, paths))}; expected a folder with the "
            f"weights of each rank of another program ({', '.join(READING)})"
        )
    _STATED.update(by_folder)


def forget_options() -> None:
    """Read every folder as its files say."""
    _STATED.clear()


def options_of(folder: Path, kind: type[T]) -> T:
    """The options of a ``kind`` that were stated for ``folder``, or for one around it."""
    folder = folder.absolute()
    stated = (_STATED.get(path) for path in (folder, *folder.parents))
    return next((each for each in stated if isinstance(each, kind)), None) or kind()


def parsed(setting: Setting, value: object) -> object:
    """A value of ``setting``, which may be text. Raises ``CheckpointError``."""
    hint = without_none(setting.hint)
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        names = ", ".join(typing.get_args(hint))
        raise CheckpointError(f"{setting.name}: expected one of {names}, got {value!r}")
    if hint is Path:
        return Path(str(value)).expanduser().absolute()
    parse = getattr(hint, "from_text", None)
    return parse(value) if parse is not None and isinstance(value, str) else value


def without_none(hint: Any) -> Any:
    """The type of an optional setting."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return inner
