"""The rows on which weights are calibrated: those that the run was trained on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...batch import Features
from ...data.prepared.training_data import open_stream, prepare
from ...data.text.codec import Codec
from ...data.text.pairs import with_chosen
from ...errors import ModelError
from ...recipe.recipe import Recipe
from ...recipe.recipe_data import encoding_of
from ...use.held_out_set import own_codec
from ...use.model_loading import ModelFolders, codec_of

LONGEST = 2048  # tokens of a row
FEWEST = 128  # tokens of all rows, or of an expert; of fewer, GPTQ would learn only these


def calibration_rows(parts: ModelFolders, count: int) -> list[list[int]]:
    """The token ids of ``count`` rows of the run's training data: evenly spaced, or the first of a
    stream. Raises ``ModelError`` if there is no run, or too little data."""
    recipe = parts.recipe
    if recipe is None:
        raise ModelError(
            f"{parts.folder}: has no recipe, so no data to calibrate on; export the folder of a "
            "run, or use --algorithm rtn"
        )
    codec, found = own_codec(recipe, codec_of(parts)), []
    for item in (_of_stream if recipe.data.streaming else _spaced)(recipe, codec, count):
        chat = with_chosen(item)
        name = next(name for name in chat if name.endswith("input_ids"))
        found.append([int(i) for i in chat[name][:LONGEST]])
    if (tokens := sum(map(len, found))) < FEWEST:
        raise ModelError(
            f"{parts.folder}: {len(found)} rows of its training data have {tokens} tokens in all, "
            f"too few to calibrate on (at least {FEWEST}); use --algorithm rtn"
        )
    return found


def _spaced(recipe: Recipe, codec: Codec, count: int) -> Iterator[Features]:
    data = prepare(encoding_of(recipe, codec)).train
    chosen = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int)
    yield from (data[int(index)] for index in np.unique(chosen))


def _of_stream(recipe: Recipe, codec: Codec, count: int) -> Iterator[Features]:
    """The first that are not held out; encoded as far as that takes."""
    data = open_stream(encoding_of(recipe, codec))
    held = set(data.held.tolist())
    known = data.train.reach(count + len(held))
    chosen = [item for item in range(min(known, count + len(held))) if item not in held]
    yield from (data.train[item] for item in chosen[:count])
