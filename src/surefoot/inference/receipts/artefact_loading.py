"""Open an artefact as other programs do, with transformers' own loaders only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ...errors import ModelError, installation
from ...model.pretrained.loading import device
from .receipt import Artefact

PACKAGES = {"compressed-tensors": "compressed_tensors", "gguf": "gguf"}
UNREAD = {
    "gguf-adapter": "transformers opens no GGUF adapters",
    "adapter": "an adapter of a reward model writes no text",
    "reward": "a reward model writes no text; compare its scores with `surefoot predict`",
}
"""By ``to``: why nothing is computed with it."""
_OF_LOADERS = (
    *(ValueError, OSError, ImportError, LookupError, RuntimeError),
    *(TypeError, AttributeError, AssertionError),
)


def check_package(artefact: Artefact) -> None:
    """Raise ``ModelError`` if the package that opens the artefact is missing."""
    name = PACKAGES.get(artefact.to, "transformers")
    if importlib.util.find_spec(name) is None:
        raise ModelError(
            f"the package {name.replace('_', '-')}, with which transformers opens the artefact, is "
            f"not installed: {installation(name)}"
        )


def open_artefact(target: Path, artefact: Artefact) -> Any:
    """The transformers model, in float32. Raises ``ModelError`` if it does not open."""
    check_package(artefact)
    named: dict[str, Any] = {} if target.is_dir() else {"gguf_file": target.name}
    folder = target if target.is_dir() else target.parent
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **named
        )
    except _OF_LOADERS as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{target}: transformers cannot open it: {said}") from None
    return model.to(device()).eval()
