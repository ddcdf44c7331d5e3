"""What a recipe means on this machine now: the checkpoint that a run's folder means, and the
settings of an adapter that is continued. Reading a recipe opens none of these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .. import schema
from ..checkpoint.disk.commit import named
from ..checkpoint.layouts.reading import check_reading
from ..errors import CheckpointError
from ..recipe.comparison import changes
from ..recipe.files import ADAPTER, CONFIG, read_adapter
from ..recipe.recipe import Recipe
from ..recipe.run_recipe import checkpoint_of
from ..schema import Problem
from ..schema.locations import ModelPath
from ..storage import files


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with checkpoints in place of the folders of runs, and with the settings of the
    adapter that it continues. Opens folders. Raises ``RecipeError``, and ``CheckpointError`` for
    ``model.reading``."""
    recipe = schema.mapped(recipe, _of_run)
    check_reading((recipe.model.path, recipe.checkpoint.resume), recipe.model.reading)
    model = recipe.model
    model = replace(
        model,
        path=located(model.path),
        adapter=None if model.adapter is None else adapter_in(Path(model.adapter)),
        frozen_adapters=tuple(adapter_in(Path(folder)) for folder in model.frozen_adapters),
    )
    return with_adapter_settings(replace(recipe, model=model))


def _of_run(value: object, _path: schema.Keys) -> object:
    """The checkpoint of a run that a setting names as a model; other values as they are."""
    return ModelPath(located(value)) if isinstance(value, ModelPath) else value


def located(name: str) -> str:
    """A model's folder, of a run its checkpoint; what is no folder is not changed: a hub id."""
    folder = Path(name)
    if not folder.is_absolute() or not files.is_folder(folder) or (folder / CONFIG).is_file():
        return name
    try:
        return str(checkpoint_of(folder)) if named(folder) else name
    except CheckpointError:
        return name  # which is refused when it is opened, as a folder that is no model


def adapter_in(folder: Path) -> Path:
    """The folder of an adapter: of a run, the checkpoint that its folder means."""
    checkpoints = named(folder)
    if not checkpoints or (folder / ADAPTER).is_file():
        return folder
    try:
        return checkpoint_of(folder)
    except CheckpointError:
        return checkpoints[-1]  # which says what is wrong with it when it is opened


def with_adapter_settings(recipe: Recipe) -> Recipe:
    """The recipe with the method's settings of the adapter that it continues, if there is one.
    Raises ``RecipeError`` if it sets others itself."""
    adapter = None if recipe.model.adapter is None else read_adapter(recipe.model.adapter)
    if adapter is None:
        return recipe
    try:
        continued = replace(recipe, method=recipe.method.continued(adapter))
    except (ValueError, TypeError) as error:
        problem = f"{recipe.model.adapter}/{ADAPTER} has settings that are not supported: {error}"
        raise schema.recipe_error([Problem(("model", "adapter"), problem)]) from None
    usual = replace(recipe, method=type(recipe.method)())
    set_paths = {change.path for change in changes(recipe, usual)}
    problems = [
        Problem(
            tuple(change.path.split(".")),
            f"{change.old}, but {change.new} in model.adapter ({recipe.model.adapter}); leave it "
            "out to continue with the adapter's",
        )
        for change in changes(recipe, continued)
        if change.path in set_paths
    ]
    if problems:
        raise schema.recipe_error(problems)
    return continued
