"""Options for reading a folder of another program, where its files do not say it. No torch.

How weights were sharded is a fact about their folder. A user states it in an option or a recipe,
and who opens the folder is given it (docs/decisions/0108).
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
from .layout import Reading


class LayoutOptions(Protocol):
    """A dataclass of options; all are optional."""

    def fits(self, folder: Path) -> bool:
        """Whether reading ``folder`` depends on the options that are set."""


READING: Mapping[str, type[LayoutOptions]] = Extended("reading", {})
"""The options of each layout."""
T = TypeVar("T")


def check_reading(folders: Iterable[str | Path | None], reading: Reading) -> None:
    """Raise ``CheckpointError`` if the options belong to none of ``folders`` that exist; or a value
    is invalid."""
    places = [Path(folder).expanduser().absolute() for folder in folders if folder]
    places = [place for place in places if reading and files.exists(place)]
    for place in places:
        layout = detect_layout(place)
        kind = None if layout is None else READING.get(layout.name)
        is_known = kind is not None and reading.keys() <= settings(kind).keys()
        if kind is not None and is_known and options_of(kind, reading).fits(place):
            return
    if places:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in reading)
        raise CheckpointError(
            f"{names}: has no effect on {', '.join(map(str, places))}; expected a folder with the "
            f"weights of each rank of another program ({', '.join(READING)})"
        )


def options_of(kind: type[T], reading: Reading) -> T:
    """Those of a ``kind`` in ``reading``. Raises ``CheckpointError`` for an invalid value."""
    cls: type = kind
    known = settings(cls)
    return kind(**{name: parsed(known[name], reading[name]) for name in reading if name in known})


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
