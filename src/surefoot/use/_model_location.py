"""Find a model: in a run, a checkpoint, a model or adapter folder, by a recipe or a hub id."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.converting.targets import read_config
from ..checkpoint.disk.commit import named, step_of
from ..checkpoint.layouts.detection import detect_layout, open_weights
from ..checkpoint.layouts.layout import AS_STORED, Reading
from ..checkpoint.layouts.opening import has_opener, open_named
from ..checkpoint.remote import stores
from ..checkpoint.verification import verify
from ..errors import CheckpointError, ModelError, RecipeError, counted
from ..model.loading import fetch
from ..model.section import ModelSection
from ..recipe.files import ADAPTER, RUN_RECIPE, SUFFIXES, is_run
from ..recipe.recipe import Recipe, load
from ..recipe.run_recipe import NONE_DAMAGED, Damaged, best_of, checkpoint_of
from ..schema.locations import DATA_FILES
from ..storage import files
from ..storage.remote import Address, is_address
from ..storage.weight_files import is_adapter as has_adapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelLocation:
    """A folder of weights that can be opened."""

    folder: Path
    is_adapter: bool  # of a base that lies elsewhere
    recipe: Recipe | None = None  # of the run that made it
    is_chosen: bool = False  # as the best or latest checkpoint of a run

    @property
    def adapter_config(self) -> Path:
        """The file with the settings of an adapter."""
        return self.folder / ADAPTER

    def adapter_settings(self) -> dict[str, Any]:
        """The settings of an adapter. Raises ``ModelError`` if they cannot be read."""
        return read_config(self.adapter_config)

    def __str__(self) -> str:
        return str(self.folder)


def locate(
    path: str | Path,
    damaged: Damaged = NONE_DAMAGED,
    *,
    model: Path | None = None,
    reading: Reading = AS_STORED,
) -> ModelLocation:
    """The weights at ``path``.

    Args:
        path: a run's folder (its best checkpoint if the recipe ends with that one, otherwise the
            latest valid one), a checkpoint, the URL of either, a model or adapter folder, a recipe
            file, a hub id.
        damaged: checkpoints that are known to be damaged, which a run's folder never means.
        model: the folder of their configuration, if it is elsewhere.
        reading: how weights of another program are read, where their files do not say it.

    Raises:
        ModelError: nothing exists there, or no weights that can be read.
        CheckpointError: a checkpoint is damaged, or a run has none yet.
    """
    if isinstance(path, str) and is_address(path):
        return _of_address(Address(path))
    local = Path(path).expanduser()
    if files.size_of(local) is not None:
        return _of_recipe(local, damaged)
    if files.is_folder(local):
        return _of_folder(local, damaged, model=model, reading=reading)
    if str(path).startswith((".", "/", "~")):
        raise ModelError(f"no folder {path}; expected a run, a checkpoint, a model or an adapter")
    return _of_folder(_of_hub(str(path)), shown=str(path))


def _of_hub(name: str) -> Path:
    """The download of a hub model, or of a folder in one: ``me/run/checkpoint-4``."""
    parts = name.split("/")
    model, inside = "/".join(parts[:2]), "/".join(parts[2:])
    if inside and files.is_folder(Path(model)):
        raise ModelError(f"no folder {name}; expected a run, a checkpoint, a model or an adapter")
    try:
        folder = fetch(ModelSection(path=model), inside=f"{inside}/" if inside else "") / inside
    except ModelError as error:  # which speaks of a recipe's field
        message = str(error).removeprefix("model.path: ")
        raise ModelError(message.replace(repr(model), repr(name), 1)) from None
    if not files.is_folder(folder):
        raise ModelError(f"the hub model {model} has no folder {inside!r}")
    return folder


def _of_recipe(path: Path, damaged: Damaged) -> ModelLocation:
    if path.suffix not in SUFFIXES:
        if path.suffix.lower() in DATA_FILES:
            raise ModelError(
                f"{path}: is a file of rows; expected a run, a checkpoint, a model or a recipe; "
                f"`surefoot predict MODEL --prompts {path} --output OUT` answers its rows"
            )
        raise ModelError(f"{path}: is a file; expected its folder, or a recipe")
    folder = load(path).train.output_dir
    if isinstance(folder, Address):
        return _of_address(folder)
    if not named(folder):
        raise CheckpointError(
            f"{path}: its run in {folder} has no checkpoint yet; run `surefoot train {path}` first"
        )
    return _of_run(folder, damaged)


def _of_address(address: Address) -> ModelLocation:
    """The same in a store; the checkpoint is downloaded."""
    newest = stores().fetch(address)
    best = None if step_of(Path(address.name)) >= 0 else best_of(newest)
    return _with_recipe(newest if best is None else stores().fetch(address.inside(best)))


def _of_folder(
    folder: Path,
    damaged: Damaged = NONE_DAMAGED,
    *,
    shown: str | None = None,
    model: Path | None = None,
    reading: Reading = AS_STORED,
) -> ModelLocation:
    """The weights in a folder, ``shown`` under another name if it is a download."""
    if detect_layout(folder) is not None and not is_run(folder):
        _check(folder, model, reading)
        return _with_recipe(folder)
    if named(folder):
        return _of_run(folder, damaged)
    if (folder / RUN_RECIPE).is_file():
        raise CheckpointError(
            f"{folder}: this run has no checkpoint yet; `surefoot train` saves the first one"
        )
    if inside := [
        name for name in files.list_folder(folder) if (folder / name / ADAPTER).is_file()
    ]:
        raise ModelError(
            f"{shown or folder}: contains {counted(len(inside), 'adapter')} in folders of their "
            f"own ({', '.join(inside)}); name one: {shown or folder}/{inside[0]}"
        )
    open_weights(folder)  # says what is there instead
    raise ModelError(f"{folder}: contains no weights that can be read")


def _check(folder: Path, model: Path | None, reading: Reading) -> None:
    if model is not None and has_opener(folder):
        open_named(folder, model, reading)
        return
    report = verify(folder, full=False, reading=reading)
    if not report.ok:
        raise CheckpointError(report.problems[0])


def _of_run(run: Path, damaged: Damaged) -> ModelLocation:
    return replace(_with_recipe(checkpoint_of(run, damaged)), is_chosen=True)


def _with_recipe(folder: Path) -> ModelLocation:
    layout = detect_layout(folder)
    is_marked = layout is not None and layout.has_adapter_config
    is_adapter = has_adapter(folder) and is_marked
    path = folder / RUN_RECIPE
    if not path.is_file():
        return ModelLocation(folder, is_adapter)
    try:
        return ModelLocation(folder, is_adapter, load(path, is_saved=True))
    except RecipeError as error:
        logger.warning(
            "the recipe beside the weights cannot be read, so its system message and its generate "
            "section are not used: %s",
            error,
        )
        return ModelLocation(folder, is_adapter)
