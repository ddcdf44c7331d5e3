"""Open the weights of a folder of any layout as tensor sources.

Reward models are stored as transformers' sequence classification stores them: a language model's
weights with the head ``score`` in place of its output embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from ...errors import CheckpointError, ModelError
from ...extensions import Extended
from ...storage import files
from ..disk import tensorfile
from ..disk.folder import FolderWeights, TensorLocation, open_checkpoint, places, tensors_in
from ..sources import FolderSource, Renamed, TensorSource, read_whole
from .detection import (
    detect_layout,
    expect_layout,
    has_manifest,
    is_sequence_classification,
    open_weights,
)
from .layout import AS_STORED, Layout, Reading, has_model


class Opener(Protocol):
    """Opens a folder of a layout with names of its own."""

    def __call__(
        self, layout: Layout, folder: Path, base: Path | None, *, is_checked: bool
    ) -> TensorSource:
        """As ``open_named``."""


class PickleOpener(Protocol):
    """Opens folders whose weights are pickles."""

    def __call__(self, folder: Path, *, trust_pickle: bool) -> TensorSource | None:
        """The weights; None for other folders. Raises ``CheckpointError``: not trusted."""


_OPENERS: Mapping[str, Opener] = Extended("openers", {})
_PICKLED: Mapping[str, PickleOpener] = Extended("pickled", {})


def open_folder(path: Path | str, reading: Reading = AS_STORED) -> TensorSource:
    """The weights in a folder of any layout. A ``CheckpointError`` says what to do instead."""
    return FolderSource(open_weights(Path(path), reading))


def open_any(folder: Path, *, trust_pickle: bool = False) -> TensorSource:
    """The same, also of folders whose weights are pickles, if the user trusts them."""
    sources = (opener(folder, trust_pickle=trust_pickle) for opener in _PICKLED.values())
    return next((source for source in sources if source is not None), None) or open_folder(folder)


def open_named(
    path: Path | str,
    model: Path | None = None,
    reading: Reading = AS_STORED,
    *,
    is_checked: bool = False,
) -> TensorSource:
    """The same under Hugging Face's names. ``model``: their model's folder, if not around them;
    ``is_checked`` as in ``FolderSource``."""
    if has_opener(Path(path)):
        layout = expect_layout(Path(path), reading)
        return _OPENERS[layout.name](layout, Path(path), model, is_checked=is_checked)
    source = FolderSource(open_weights(Path(path), reading), is_checked)
    if is_sequence_classification(Path(path)):
        return as_language_model(source, Path(path))
    return source


def has_opener(folder: Path) -> bool:
    """Whether the layout of ``folder`` has names of its own."""
    layout = detect_layout(folder)
    return layout is not None and layout.name in _OPENERS


def open_role(folder: Path, role: str) -> TensorSource | None:
    """The weights of a ``role`` with files of its own beside a model's; None if there are none."""
    path, tensors = folder / f"{role}.safetensors", dict[str, TensorLocation]()
    with files.raising(CheckpointError, f"cannot read {path}"):
        if has_manifest(folder):
            checkpoint = open_checkpoint(folder)
            tensors = places(checkpoint, checkpoint.manifest.tensors(role))
        if not tensors and files.exists(path):
            tensors = tensors_in([tensorfile.open_path(path)])
    return FolderSource(FolderWeights(role, folder, tensors)) if tensors else None


def scattered(folder: Path | str, reading: Reading = AS_STORED) -> dict[str, torch.Tensor] | None:
    """Weights of several ranks or of MindSpore, joined, of a reward model, or of files that
    transformers reads otherwise; None if ``from_pretrained`` reads them."""
    path = Path(folder)
    if is_sequence_classification(path):
        return read_named(path, reading=reading)
    layout = detect_layout(path)
    if layout is None or layout.has_manifest or not layout.is_whole_model:
        is_read = layout is not None and layout.is_assembled and not has_model(path)
    else:
        is_read = not _is_plain(path)
    return read_named(path, reading=reading) if is_read else None


def _is_plain(path: Path) -> bool:
    """Whether every tensor in a model's files has its own name, and is there once: transformers
    unwraps no names, and takes a tensor in two files from the last, not from the index's."""
    try:
        tensors = open_weights(path).tensors
    except CheckpointError:  # transformers will say what is wrong
        return True
    sizes = {place.file.path: len(place.file.header.entries) for place in tensors.values()}
    return sum(sizes.values()) == len(tensors) and all(n == p.key for n, p in tensors.items())


def read_named(
    path: Path, model: Path | None = None, reading: Reading = AS_STORED
) -> dict[str, torch.Tensor]:
    """All tensors of ``open_named``, in memory."""
    source = open_named(path, model, reading)
    return {name: read_whole(source, name) for name in source.shapes()}


SCORE = "score.weight"
_OUTPUT, _INPUT = "lm_head.weight", "embed_tokens.weight"


def as_language_model(source: TensorSource, folder: Path) -> TensorSource:
    """The weights under the names of the language model, without ``score``. Its output embeddings,
    which a score does not need, are those of the input. Raises ``ModelError`` for an architecture
    of other names."""
    shapes = source.shapes()
    if SCORE not in shapes:
        raise ModelError(
            f"{folder}: a sequence classification without {SCORE}, whose head has another form; "
            "name a language model, or a classifier with a linear head"
        )
    names = {name: name for name in shapes if name != SCORE}
    if _OUTPUT in names:
        return Renamed(source, names)
    input_embeddings = next((name for name in names if name.endswith(_INPUT)), None)
    if input_embeddings is None:
        raise ModelError(
            f"{folder}: a sequence classification whose input embeddings have another name than "
            f"{_INPUT}, which cannot be opened as a language model with a head"
        )
    return Renamed(source, {**names, _OUTPUT: input_embeddings})
