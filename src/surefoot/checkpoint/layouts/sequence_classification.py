"""Reward models as transformers' sequence classification stores them: a language model's weights
with the head ``score`` in place of its output embeddings."""

from __future__ import annotations

from pathlib import Path

from ...errors import ModelError
from ..sources.source import Renamed, TensorSource

SCORE = "score.weight"
_OUTPUT, _INPUT = "lm_head.weight", "embed_tokens.weight"


def as_language_model(source: TensorSource, folder: Path) -> TensorSource:
    """The weights under the names of the language model, without ``score``. Its output embeddings,
    which a reward does not need, are those of the input. Raises ``ModelError`` for a classifier of
    several classes, or an architecture of other names."""
    shapes = source.shapes()
    if shapes.get(SCORE, (0,))[0] != 1:
        raise ModelError(
            f"{folder}: a sequence classification without one {SCORE}, so it is no reward model; "
            "name a language model, or a classifier of one label"
        )
    names = {name: name for name in shapes if name != SCORE}
    if _OUTPUT in names:
        return Renamed(source, names)
    found = next((name for name in names if name.endswith(_INPUT)), None)
    if found is None:
        raise ModelError(
            f"{folder}: a sequence classification whose input embeddings have another name than "
            f"{_INPUT}, which cannot be opened as a reward model"
        )
    return Renamed(source, {**names, _OUTPUT: found})
