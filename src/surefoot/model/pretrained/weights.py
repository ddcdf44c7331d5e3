"""The weights of a model as states to save and restore, under the names in its files.

transformers 5 fuses and renames tensors at loading for some architectures (experts, for example). A
file with module names could not be loaded with ``from_pretrained``, so the names are converted back
before a save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ...errors import CheckpointError, counted
from ...parallel.sharding import Cuts, FusedSlice
from ..fused_parameters import FusedPlacement, places, view
from ..section import ModelSection
from .companions import adapter_files, model_files

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class FullWeights:
    """All weights of a transformers model; tied ones once, under the name transformers keeps."""

    model: PreTrainedModel
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by name, of what is spread
    apart: Collection[str] = ()  # names of parameters that have a file of their own
    kind: ClassVar[Literal["full", "adapter"]] = "full"
    is_adapter: ClassVar[bool] = False

    @property
    def is_converted(self) -> bool:
        """Whether transformers fuses or renames tensors of the files when it loads them."""
        return self._own().keys() != self.state_dict().keys()

    def without(self, names: Collection[str]) -> FullWeights:
        """The weights but for ``names``, which have a file of their own."""
        return replace(self, apart=names)

    def sharded(self, cuts: Mapping[str, Cuts]) -> FullWeights:
        """The same weights after their tensors were sharded."""
        return replace(self, cuts=cuts)

    def small_files(
        self, section: ModelSection, folder: Path | None, stop_token_ids: Sequence[int]
    ) -> dict[str, bytes]:
        """``config.json``, ``generation_config.json`` and the model's own code."""
        return model_files(self.model, folder, stop_token_ids)

    def cuts_of(self, name: str) -> Cuts | None:
        """The sharding of a tensor; None if it is not recorded."""
        if self.cuts and name not in self.cuts and (at := self._fused.get(name)) is not None:
            cuts = self.cuts.get(at.fused, ())
            assert not isinstance(cuts, FusedSlice)
            return FusedSlice(at.whole, at.start, cuts)
        return self.cuts.get(name)

    def is_copy(self, name: str) -> bool:
        """No other pipeline stage has it."""
        return False

    def like(self, name: str) -> torch.Tensor | None:
        """None: every tensor is there from the beginning."""
        return None

    @cached_property
    def _fused(self) -> dict[str, FusedPlacement]:
        return places(self.model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors under the names of the model's Hugging Face files; of sharded ones,
        slices of fused tensors are views."""
        own, parts = self._own(), {}
        if any(isinstance(tensor, DTensor) for tensor in own.values()):
            parts = {n: view(own[at.fused], at, self.cuts_of(n)) for n, at in self._fused.items()}
            own = {n: t for n, t in own.items() if n not in {a.fused for a in self._fused.values()}}
        renamed: dict[str, torch.Tensor] = revert_weight_conversion(self.model, own)
        return {**renamed, **parts}

    @torch.no_grad()
    def load_state_dict(self, state: Tensors) -> None:
        """Copy ``state`` into it. Raises ``CheckpointError`` if it is of another model."""
        wanted = self._own()
        if state.keys() != wanted.keys():
            wanted = self.state_dict()
            _check_names(state, wanted)
            if not any(isinstance(tensor, DTensor) for tensor in wanted.values()):
                self._load_converted(state)
                return
        for name, tensor in wanted.items():
            if tensor is not state[name] and not _is_same(tensor, state[name]):
                tensor.copy_(state[name])

    def _own(self) -> dict[str, torch.Tensor]:
        """The live tensors by the names of modules, tied ones once."""
        left_out = {*self.model.all_tied_weights_keys, *self.apart}
        return {name: t for name, t in self.model.state_dict().items() if name not in left_out}

    def _load_converted(self, state: Tensors) -> None:
        """Let transformers fuse and rename ``state`` as it does when it loads a folder."""
        fresh = type(self.model).from_pretrained(
            None, config=self.model.config, state_dict=dict(state), dtype=self.model.dtype
        )
        self.model.load_state_dict(fresh.state_dict(), strict=not self.apart)


@dataclass(frozen=True)
class AdapterWeights:
    """The weights of a PEFT adapter under the names of ``adapter_model.safetensors``."""

    model: nn.Module
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by name, of what is spread
    adapter: str = "default"  # which of the model's
    kind: ClassVar[Literal["full", "adapter"]] = "adapter"
    is_adapter: ClassVar[bool] = True
    is_converted: ClassVar[bool] = False

    def without(self, _names: Collection[str]) -> Self:
        """An adapter's files have none of the model's own tensors."""
        return self

    def sharded(self, cuts: Mapping[str, Cuts]) -> Self:
        """The same weights after their tensors were sharded."""
        return replace(self, cuts=cuts)

    def small_files(
        self, section: ModelSection, folder: Path | None, stop_token_ids: Sequence[int]
    ) -> dict[str, bytes]:
        """``adapter_config.json``, which names the base as the recipe does; ``config.json`` only if
        the positions of the base are extended."""
        return adapter_files(self.model, section)

    def cuts_of(self, name: str) -> Cuts | None:
        """The sharding of a tensor; None if it is not recorded."""
        return self.cuts.get(name)

    def is_copy(self, name: str) -> bool:
        """No other pipeline stage has it."""
        return False

    def like(self, name: str) -> torch.Tensor | None:
        """None: every tensor is there from the beginning."""
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors by PEFT's names, without the adapter's own name."""
        from peft import get_peft_model_state_dict

        state: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, adapter_name=self.adapter, save_embedding_layers=False
        )
        return state

    def load_state_dict(self, state: Tensors) -> None:
        """Copy ``state`` into it. Raises ``CheckpointError`` if it is of another model."""
        from peft import set_peft_model_state_dict

        _check_names(state, self.state_dict())
        set_peft_model_state_dict(self.model, dict(state), adapter_name=self.adapter)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory."""
    here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
    return here.data_ptr() == there.data_ptr()


def trained(model: nn.Module, in_files: Tensors) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, each under its name in the weight files if it has one there."""
    names = names_in_files(model, in_files)
    return [(names[name], p) for name, p in model.named_parameters() if p.requires_grad]


def names_in_files(model: nn.Module, in_files: Tensors) -> dict[str, str]:
    """For each parameter of ``model`` its name in the weight files, or else its own."""
    known = {place(tensor): name for name, tensor in in_files.items()}
    return {name: known.get(place(p), name) for name, p in model.named_parameters()}


def place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The address of the values; on the meta device, which has no addresses, a substitute."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _check_names(found: Tensors, wanted: Tensors) -> None:
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"weights of another model: {counted(len(missing), 'tensor')} missing, "
            f"{len(unexpected)} unexpected (for example {(missing or unexpected)[0]})"
        )
