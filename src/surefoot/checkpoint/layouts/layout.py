"""A layout: a kind of folder of weights, and how to look into it. No torch.

Names and headers are read, never a tensor. What differs between layouts is a field or a method
here, so that nobody compares a layout's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..sources.weights import TensorLocation, Weights

Locations = Mapping[str, TensorLocation]  # by name


@dataclass(frozen=True)
class SavedFolder:
    """One save of a training: what to open, and its description."""

    path: Path
    step: int | None
    num_bytes: int


class Layout(Protocol):
    """A kind of folder of weights."""

    name: ClassVar[str]
    """As in ``LAYOUTS`` and in ``--json``."""

    title: ClassVar[str]
    """For people."""

    has_manifest: ClassVar[bool]
    """Whether hashes, states and the parent are in a manifest: a Surefoot checkpoint."""

    is_adapter: ClassVar[bool]
    """Whether its weights are always those of an adapter."""

    has_adapter_config: ClassVar[bool]
    """Whether its ``adapter_config.json`` means that the weights are an adapter's."""

    is_assembled: ClassVar[bool]
    """Whether Surefoot joins its files for transformers, if ``model.safetensors`` is missing."""

    is_whole_model: ClassVar[bool]
    """Whether such a folder is all of a model or adapter, not only its weights."""

    pickle_suffixes: ClassVar[tuple[str, ...]]
    """Of files beside its weights that are pickles."""

    def recognise(self, folder: Path) -> bool:
        """Whether ``folder`` is of this layout and no other. Reads names only."""

    def open(self, folder: Path) -> Weights:
        """The weights, by the names in the files; a ``CheckpointError`` if they are damaged."""

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """Every tensor by its full name, ``role/name``; only of ``roles`` of all networks, if
        given: model, optimizer, state."""

    def states(self, folder: Path) -> Mapping[str, Any]:
        """The states without their tensors, or what the folder logged of its training."""

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """The content of a file beside the weights; None if there is none."""

    def saves_in(self, folder: Path) -> Sequence[SavedFolder]:
        """The saves of a training in one folder; none if every save has a folder of its own."""
