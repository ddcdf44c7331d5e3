"""Foreign weights, or an adapter alone, as a folder that the usual tools open.

A folder of PyTorch's distributed checkpoints contains only tensors: configuration and tokenizer
come from the model from which it was trained (``base``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..checkpoint.converting.resharding import ALONE
from ..checkpoint.converting.weights_only import write_weights
from ..checkpoint.disk.atomic_folder import new_folder, write_small
from ..checkpoint.disk.companions import beside
from ..checkpoint.disk.folder import open_checkpoint
from ..checkpoint.disk.manifest import Kind, Layout, is_safetensors
from ..checkpoint.layouts import open_folder
from ..checkpoint.mindspore.ranks import model_near
from ..checkpoint.mindspore.theirs import NOTHING_MORE, MindSporeHints, open_model
from ..checkpoint.reading.contents import small_file
from ..checkpoint.sources.copying import cast, copy
from ..checkpoint.sources.source import FolderSource, Renamed, TensorSource
from ..checkpoint.weights import ADAPTER_CONFIG, detect_layout, open_weights
from ..errors import CheckpointError
from ..geometry.mesh import Mesh
from ..interchange.source import open_source
from ..storage import files
from .exported import configs

Progress = Callable[[int], None]
_CONFIG = "config.json"
_PREFIX = "model."  # of ``dcp.save({"model": model.state_dict()})``
_OURS = {"state.json", "recipe.yaml", "trainer_state.json"}  # of a run, not of an adapter


def write_model(
    source: TensorSource,
    target: Path,
    *,
    base: Path | None,
    beside_it: Path | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``source`` into the new folder ``target`` as a Hugging Face model.

    Args:
        source: the weights, under the names of Hugging Face's files.
        target: a folder that does not exist.
        base: a folder of the same model, whose configuration and tokenizer are copied, and whose
            tensors must all exist in ``source``; None: weights only.
        beside_it: if there is no base, a folder with a configuration and tokenizer to copy.
        dtype: float32, float16 or bfloat16; None: unchanged.
        progress: called with the bytes of each block written.

    Raises:
        CheckpointError: weights of another model than ``base``, or a write that fails.
    """
    source = cast(source if base is None else _named_as(source, base), dtype)
    place = base or beside_it
    small = {} if place is None else companions(place, source)
    with new_folder(target) as folder:
        copy(source, folder, progress=progress)
        write_small(folder, small)


def companions(base: Path, source: TensorSource) -> dict[str, bytes]:
    """The companions of the weights in ``base``, with the configuration changed to fit
    ``source``.
    """
    found = beside(base, base)
    return found | (configs(base, source) if files.exists(base / _CONFIG) else {})


def _named_as(source: TensorSource, base: Path) -> TensorSource:
    """``source`` under the names that ``base`` uses."""
    wanted, found = set(open_folder(base).shapes()), source.shapes()
    bare = {name.removeprefix(_PREFIX): name for name in found}
    if not wanted <= found.keys() and wanted <= bare.keys():
        source = Renamed(source, bare)
        found = source.shapes()
    if missing := sorted(wanted - found.keys()):
        raise CheckpointError(
            f"weights of another model than {base}: of its {len(wanted)} tensors {len(missing)} "
            f"are missing (for example {missing[0]})"
        )
    return source


def write_checkpoint(
    folder: Path,
    target: Path,
    *,
    theirs: MindSporeHints = NOTHING_MORE,
    layout: Layout = "full",
    mesh: Mesh = ALONE,
    dtype: str | None = None,
    trust_pickle: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the foreign weights in ``folder`` as a weights-only Surefoot checkpoint.

    Raises ``CheckpointError`` for damaged weights, or if ``target`` exists.
    """
    small: Mapping[str, bytes]
    kind: Kind = "full"
    found = detect_layout(folder)
    if found == "peft":
        kind, source, small = "adapter", open_folder(folder), _adapter_files(folder)
    else:
        source = (
            open_model(folder, theirs)
            if found == "mindspore"
            else open_source(folder, trust_pickle=trust_pickle)
        )
        place = theirs.base or model_near(folder)
        if theirs.base is not None:
            source = _named_as(source, theirs.base)
        small = {} if place is None else companions(place, cast(source, dtype))
    write_weights(
        source,
        target,
        kind=kind,
        layout=layout,
        mesh=mesh,
        dtype=dtype,
        small=small,
        progress=progress,
    )


def write_adapter(
    folder: Path, target: Path, *, dtype: str | None = None, progress: Progress | None = None
) -> None:
    """Write the adapter of a checkpoint in PEFT's form, without training state.

    Raises ``CheckpointError`` if ``folder`` contains none.
    """
    if detect_layout(folder) not in ("native", "peft") or not files.exists(folder / ADAPTER_CONFIG):
        raise CheckpointError(f"{folder}: it contains no adapter; use --to huggingface for a model")
    source = cast(FolderSource(open_weights(folder)), dtype)
    small = _adapter_files(folder)
    with new_folder(target) as made:
        copy(source, made, stem="adapter_model", max_shard_size=None, progress=progress)
        write_small(made, small)


def _adapter_files(folder: Path) -> dict[str, bytes]:
    if detect_layout(folder) == "native":
        names = open_checkpoint(folder).manifest.files.keys() - _OURS
        kept = [name for name in names if not is_safetensors(name)]
    else:
        kept = [ADAPTER_CONFIG, *beside(folder, folder)]
    found = {name: small_file(folder, name) for name in sorted(kept)}
    return {name: data for name, data in found.items() if data is not None}
