"""What a folder of weights is: a model or an adapter. One with the files of both is neither: it is
usually a merged model whose adapter was left in it, and programs differ in what they open."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from . import files

_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MODEL = (  # of transformers, in one file or several; of a sharded checkpoint
    *("model.safetensors", "model.safetensors.index.json"),
    "rank_00000/model.safetensors",
)


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` has the settings of an adapter, by names alone. Raises ``ModelError`` if
    it has the weights of a model as well."""
    if not files.exists(folder / _ADAPTER):
        return False
    if model := next((name for name in _MODEL if files.exists(folder / name)), None):
        both = [name for name in (_ADAPTER, _ADAPTER_WEIGHTS) if files.exists(folder / name)]
        raise ModelError(
            f"{folder}: contains a model ({model}) and an adapter ({' and '.join(both)}), and "
            f"programs differ in which of them they open. If the adapter is merged into the model, "
            f"delete {' and '.join(both)}; otherwise move the adapter to a folder of its own"
        )
    return True
