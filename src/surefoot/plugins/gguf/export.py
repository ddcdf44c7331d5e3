"""Export as GGUF: a model, its adapter merged, or an adapter by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...cli.exporter import Progress
from ...recipe.run_checkpoint import Damaged
from ...use.model_loading import ModelFolders, find_parts, with_valid
from .adapter_file import write_adapter
from .formats import FORMATS
from .model_file import write_model


def export_gguf(
    path: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    quantize: str,
    as_adapter: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model at ``path`` (see ``locate``) as the new file ``out``, and what Ollama needs
    beside it.

    Args:
        path: a run, checkpoint or model; an adapter is merged into its base.
        out: a file that does not exist.
        base: the base of an adapter, if it is not where the adapter says.
        quantize: one of ``FORMATS``.
        as_adapter: write the adapter alone, in float types or q8_0.
        progress: called with the bytes written and the total.

    Raises:
        ModelError: nothing to export there, a model that llama.cpp does not run, ``out`` exists.
        CheckpointError: damaged weights, values that the format cannot hold, a write that fails.
    """
    target = Path(out).expanduser().absolute()

    def find(damaged: Damaged) -> ModelFolders:
        return find_parts(path, base=base, damaged=damaged)

    def write(parts: ModelFolders) -> None:
        (write_adapter if as_adapter else write_model)(parts, target, FORMATS[quantize], progress)

    with_valid(find, write)
    return target


def to_gguf(path: str, out: Path, given: Mapping[str, Any], progress: Progress) -> Path:
    """``export --to gguf``."""
    return export_gguf(path, out, progress=progress, **given)


def to_gguf_adapter(path: str, out: Path, given: Mapping[str, Any], progress: Progress) -> Path:
    """``export --to gguf-adapter``."""
    return export_gguf(path, out, as_adapter=True, progress=progress, **given)
