"""One base in memory, and adapters on it: each row of a pass has its own, or all have the one that
is switched to."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...data.text.templates import load_template, saved_source
from ...errors import ModelError
from ...generate.responses import agree
from ...model import base_identity
from ...model.adapter_files import add_named, is_addable, remove_named
from ...model.config import extension_of
from ...model.lora_layers import AdaptersByRow, can_be_by_row
from ...model.tokenizer import TOKENIZER_CONFIG, load_tokenizer
from ...use.model_loading import LoadedModel, ModelFolders
from .body import ModelGoneError

FIRST = "default"  # PEFT's name of the adapter with which a model was opened
_TRIED = 8  # tokens of rows with which an adapter is tried


@dataclass
class SharedBase:
    """The model that was opened first. All methods but ``fits`` are for the thread that runs it."""

    opened: LoadedModel
    folder: Path  # of the base
    first: Path | None  # of the adapter with which it was opened
    by_row: AdaptersByRow
    _module: nn.Module = field(init=False)
    _active: str | None = field(init=False)  # adapter that is computed with; None: the base
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._module = self.opened.model
        # PEFT's layers are inside, and its wrapper has one active adapter of its own
        plain = replace(self.opened.network, module=self.opened.inner)
        self.opened = replace(self.opened, network=plain)
        self._active = None if self.first is None else FIRST
        self.by_row.attach(self._module)

    @property
    def is_shareable(self) -> bool:
        """Whether the base is as its files have it."""
        return self.first is None or _fits(self.first, self.opened)

    def fits(self, parts: ModelFolders) -> bool:
        """Whether the adapter of ``parts`` can be on this base beside others. Raises
        ``ModelError``: its base has changed since it was trained."""
        if parts.adapter is None or parts.model.resolve() != self.folder.resolve():
            return False
        if names := base_identity.changes_below(parts.adapter, self.folder):
            raise ModelError(
                f"{parts.adapter}: the served model {self.folder} is not the base that it was "
                f"trained on ({base_identity.some(names)} differ)"
            )
        return self.is_shareable and _fits(parts.adapter, self.opened)

    def add(self, parts: ModelFolders) -> tuple[str, LoadedModel]:
        """The adapter of ``parts`` on this base, with its own tokenizer and template, and the name
        to switch to it. Raises ``ModelError``."""
        assert parts.adapter is not None
        tokenizer = load_tokenizer(parts.tokenizer)
        template = load_template("auto", tokenizer) if saved_source(tokenizer) else None
        name = f"served_{next(self._numbers)}"
        active, self._active = self._active, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of PEFT's, about several adapters
                self._module = add_named(self._module, name, parts.adapter)
        finally:
            self.by_row.attach(self._module)
            self.use(active)
        network = self.opened.network
        loaded = LoadedModel(network, tokenizer, template, parts.recipe, parts.folder, parts.all)
        return name, loaded

    def remove(self, name: str) -> None:
        """Delete an adapter."""
        if self._active == name:
            self.use(None if self.first is None else FIRST)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._module = remove_named(self._module, name)
        self.by_row.attach(self._module)

    @torch.no_grad()
    def can_be_by_row(self, name: str) -> bool:
        """Whether rows with the adapter ``name`` may be in a pass with others: found by its layers,
        and by trying (an expert may get some rows of a batch alone)."""
        if not can_be_by_row(self._module, name):
            return False
        vocabulary = len(self.opened.inner.get_input_embeddings().weight)
        count = min(_TRIED, vocabulary)
        ids = torch.arange(4 * count, device=self.opened.inner.device).reshape(4, count)
        inputs = {"input_ids": ids % vocabulary, "use_cache": False}
        before, alone_logits = self._active, []
        try:
            for adapter in (name, None):
                self.use(adapter)
                alone_logits.append(self.opened.inner(**inputs).logits)
            with self.by_row.on([name, None, name, None]):
                mixed_logits = self.opened.inner(**inputs).logits
            return all(agree(mixed_logits[row], alone_logits[row % 2][row]) for row in range(4))
        except ValueError:  # a layer got other rows
            return False
        finally:
            self.use(before)

    def use(self, name: str | None) -> None:
        """Compute with the adapter ``name``, or with the base alone. Raises ``ModelGoneError``."""
        if name is not None and name not in getattr(self._module, "peft_config", {}):
            raise ModelGoneError
        if name == self._active:
            return
        if not hasattr(self._module, "peft_config"):
            self._active = None
            return
        tuner: Any = self._module.base_model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name is None:
                tuner.disable_adapter_layers()
            else:
                tuner.enable_adapter_layers()
                tuner.set_adapter(name, inference_mode=True)
        self._active = name


def _fits(adapter: Path, opened: LoadedModel) -> bool:
    if extension_of(adapter) or not is_addable(adapter):
        return False
    vocabulary = len(opened.inner.get_input_embeddings().weight)  # PEFT's layer has no count
    has_own = (adapter / TOKENIZER_CONFIG).is_file()
    tokenizer = load_tokenizer(adapter) if has_own else opened.tokenizer
    return len(tokenizer) <= vocabulary
