"""Open an artefact as other programs do, with transformers' own loaders only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ...errors import ModelError, installation
from ...model.pretrained.loading import device
from ...network.heads import HEADS, V_HEAD
from .adapter_loading import add_adapter
from .receipt import Artefact

PACKAGES = {
    "compressed-tensors": "compressed_tensors",
    "gguf": "gguf",
    "gguf-adapter": "gguf",
    "adapter": "peft",
}
_PLAIN: dict[str, Any] = {
    "dtype": torch.float32,
    "local_files_only": True,
    "trust_remote_code": False,
}
_OF_LOADERS = (
    *(ValueError, OSError, ImportError, LookupError, RuntimeError),
    *(TypeError, AttributeError, AssertionError),
)


class UnopenedError(ModelError):
    """Transformers does not open what was written."""


def check_package(artefact: Artefact) -> None:
    """Raise ``ModelError`` if the package that opens the artefact is missing."""
    name = PACKAGES.get(artefact.to, "transformers")
    if importlib.util.find_spec(name) is None:
        raise ModelError(
            f"the package {name.replace('_', '-')}, which opens the artefact, is "
            f"not installed: {installation(name)}"
        )


def readers(artefact: Artefact) -> list[str]:
    """The packages that ``open_artefact`` reads it with, and their versions."""
    names = dict.fromkeys(("transformers", PACKAGES.get(artefact.to, "transformers")))
    return [f"{name} {importlib.metadata.version(name)}" for name in names]


def open_artefact(target: Path, artefact: Artefact, base: Path | None) -> Any:
    """The transformers model, in float32, an adapter on its ``base``. Raises
    ``UnopenedError`` if it does not open."""
    check_package(artefact)
    try:
        with without_bars():
            model = _OPENERS.get(artefact.to, _folder)(target, base)
    except _OF_LOADERS as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnopenedError(f"{target}: transformers cannot open it: {said}") from None
    return model.to(device()).eval()


def v_head_of(target: Path) -> torch.Tensor | None:
    """The head [1, D] beside a language model; None if there is none."""
    path = target / f"{HEADS['values']}.safetensors"
    return load_file(path)[V_HEAD].float() if path.is_file() else None


def _folder(target: Path, _: Path | None) -> Any:
    named: dict[str, Any] = {} if target.is_dir() else {"gguf_file": target.name}
    folder = target if target.is_dir() else target.parent
    return AutoModelForCausalLM.from_pretrained(folder, **_PLAIN, **named)


def _gguf_adapter(target: Path, base: Path | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, **_PLAIN)
    add_adapter(model, target)
    return model


def _reward(target: Path, _: Path | None) -> Any:
    if v_head_of(target) is not None:
        return _folder(target, None)
    return AutoModelForSequenceClassification.from_pretrained(target, **_PLAIN)


def _reward_adapter(target: Path, base: Path | None) -> Any:
    from peft import PeftModel

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, **_PLAIN)
    return PeftModel.from_pretrained(model, str(target))


_OPENERS: Mapping[str, Callable[[Path, Path | None], Any]] = {
    "gguf-adapter": _gguf_adapter,
    "reward": _reward,
    "adapter": _reward_adapter,
}
"""By ``to``; anything else is a folder or a GGUF file of a complete model."""


@contextmanager
def without_bars() -> Iterator[None]:
    """A block in which the progress bars of other packages are not shown: compressed-tensors shows
    three for each model, and has no switch for them."""
    with redirect_stderr(_WithoutBars(sys.stderr)):
        yield


class _WithoutBars(io.TextIOBase):
    """Passes on what is written, but what draws progress bars and moves between their lines."""

    _MOVE = re.compile(r"(\s|\x1b\[A)*")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_bar = False  # what was written last

    def write(self, text: str) -> int:
        """Write ``text``, unless it is part of a bar."""
        is_move = self._is_bar and self._MOVE.fullmatch(text) is not None
        self._is_bar = "\r" in text or is_move
        return len(text) if self._is_bar else self._stream.write(text)
