"""Tags of a run: words of a person, in ``tags.json`` in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import RunError
from ...storage import files
from ...terminal_text import plain

NAME = "tags.json"
MAX_TAGS = 20
_MAX_BYTES = 1 << 16
_TAG = re.compile(r"[\w][\w.:+-]{0,39}")


def read_tags(folder: Path) -> list[str]:
    """The tags of a run, sorted. Raises ``RunError`` if the file cannot be read."""
    path = folder / NAME
    try:
        found = plain(files.parse_json(files.read_inside(folder, NAME, _MAX_BYTES)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{files.explain(error)}; repair or delete the file") from None
    except ValueError as error:
        raise RunError(f"{path}: cannot be read ({error}); repair or delete it") from None
    if not isinstance(found, list) or not all(isinstance(tag, str) for tag in found):
        raise RunError(f"{path}: expected a list of words; repair or delete it")
    return sorted(set(found))


def changed(before: Iterable[str], add: Iterable[str], remove: Iterable[str]) -> list[str]:
    """The tags after a change. Raises ``RunError`` for what is no tag."""
    new = list(add)
    for tag in new:
        if not _TAG.fullmatch(tag):
            raise RunError(
                f"tag {tag[:60]!r}: expected up to 40 letters, digits or any of _ . : + -, "
                "without spaces"
            )
    found = sorted((set(before) | set(new)) - set(remove))
    if len(found) > MAX_TAGS:
        raise RunError(f"{len(found)} tags: a run has at most {MAX_TAGS}")
    return found


def as_bytes(tags: Iterable[str]) -> bytes:
    """The content of the file."""
    return (json.dumps(sorted(tags), ensure_ascii=False) + "\n").encode()


def write_tags(folder: Path, tags: Iterable[str]) -> None:
    """Replace the tags of a run. Raises ``RunError``."""
    with files.raising(RunError, "cannot write the tags"):
        files.write_aside(folder / NAME, as_bytes(tags))
