"""The text of a recipe file, or the reason why it cannot be read, and what an adapter says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.disk.commit import named, step_of
from ..errors import RecipeError, explain, similar
from ..storage import files

MAX_BYTES = 1_000_000
RUN_RECIPE = "recipe.yaml"  # in the folder of a run, and in its checkpoints
ADAPTER = "adapter_config.json"
CONFIG = "config.json"  # in the folder of a model
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a path has lost its second slash
SUFFIXES = (".yaml", ".yml", ".json")


def read_text(path: Path, *, follow: bool = True) -> str:
    """The text of the file ``path``. It is a regular file; with ``follow=False``, which is for the
    recipes of runs, no link.

    Raises:
        RecipeError: it is missing (similar names are suggested), a folder, unreadable, or not text.
    """
    try:
        if path.is_dir():
            raise RecipeError(f"{path}: is a folder, expected a recipe file{_inside(path)}")
        with files.open_file(path, follow=follow) as file:
            if file.size > MAX_BYTES:
                size = f"{file.size:,} bytes"
                raise RecipeError(f"{path}: {size} is too large for a recipe; is it another file?")
            raw = files.read_all(file, MAX_BYTES)
    except FileNotFoundError:
        if _URL.match(str(path)):
            raise RecipeError(
                f"{path}: is a URL; expected a recipe file or a folder of a run. Download the "
                f"{RUN_RECIPE} of that run, and name it: its train.output_dir is the URL"
            ) from None
        raise RecipeError(f"{path}: no such file{_near(path)}") from None
    except OSError as error:
        error.filename = None  # it is said
        raise RecipeError(f"{path}: cannot be read: {explain(error)}") from None
    return _decode(raw, path)


def read_adapter(folder: Path) -> Mapping[str, object] | None:
    """The settings of the adapter in ``folder``; None if they cannot be read, which is an error
    when the adapter is."""
    try:
        adapter_config = files.read_json(folder / ADAPTER)
    except (OSError, ValueError):
        return None
    return adapter_config if isinstance(adapter_config, dict) else None


def recipe_in(path: Path) -> tuple[Path, Path | None]:
    """The recipe file that ``path`` means, and the folder of its run if ``path`` is that folder or
    one of its checkpoints."""
    if not files.is_folder(path) or not (path / RUN_RECIPE).is_file():
        return path, None
    return path / RUN_RECIPE, path.absolute().parent if is_checkpoint(path) else path


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is that of a run with checkpoints, whatever else is in it."""
    return files.exists(folder / RUN_RECIPE) and bool(named(folder))


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` has the name of a checkpoint, and is a folder."""
    return files.is_folder(path) and step_of(path) >= 0


def _decode(raw: bytes, path: Path) -> str:
    try:
        # Editors on Windows may begin a file with a byte order mark.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path}:{line}: not UTF-8 text (byte 0x{raw[error.start]:02x}); save it as UTF-8"
        ) from None
    if "\0" in text:
        raise RecipeError(f"{path}: a binary file, expected a recipe in YAML")
    return text


def _recipes(folder: Path) -> list[str]:
    """Names of the files in ``folder`` that look like recipes."""
    try:
        return sorted(f.name for f in folder.iterdir() if f.suffix in SUFFIXES)
    except OSError:
        return []


def _inside(folder: Path) -> str:
    names = [name for name in _recipes(folder) if not name.endswith(".json")][:3]
    names = names or _of_newest_checkpoint(folder)
    return f" such as {', '.join(str(folder / name) for name in names)}" if names else ""


def _of_newest_checkpoint(run: Path) -> list[str]:
    """The recipe in a run's latest checkpoint."""
    recipes = {path.parent.name: path for path in run.glob("checkpoint-*/recipe.yaml")}
    # checkpoint-900 is before checkpoint-1000, so the length of the name counts first.
    latest = max(recipes, key=lambda name: (len(name), name), default=None)
    return [] if latest is None else [str(recipes[latest].relative_to(run))]


def _near(path: Path) -> str:
    close = similar(path.name, _recipes(path.parent))
    if not close:
        close = [name for name in _recipes(path.parent) if Path(name).stem == path.stem][:1]
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
