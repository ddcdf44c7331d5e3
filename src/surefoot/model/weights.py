"""The weights of a model as states to save and restore, under the names in its files, and the
small files beside them: configuration, tokenizer, template.

transformers 5 fuses and renames tensors at loading for some architectures (experts, for example). A
file with module names could not be loaded with ``from_pretrained``, so the names are converted back
before a save. Experts are separate in files and one tensor with three dimensions in memory, with
gate before up. If the model is sharded, a rank has a box of the fused tensor, and so a box of some
of its slices. No slice is gathered to be saved or loaded.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from ..errors import CheckpointError, ModelError, counted
from ..parallel.sharding import Cuts, FusedSlice, local_offset_and_shape
from ..parallel.world import local
from ..storage.files import read_file
from .adapters import has_frozen, together
from .config import with_old_rope
from .section import ModelSection


@dataclass(frozen=True)
class FusedPlacement:
    """The position in memory of a matrix in the files."""

    fused: str  # parameter
    whole: tuple[int, int, int]  # shape of that: experts, rows, columns
    start: tuple[int, int, int]
    shape: tuple[int, int]


def places(model: PreTrainedModel) -> dict[str, FusedPlacement]:
    """The position of each matrix in the files that has no parameter of its own.

    Found by letting transformers split tensors that contain the numbers of their rows. Raises
    ``ModelError`` if the result is not that many rows in their order.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if p.ndim == 3}
    rows = {
        name: torch.arange(shape[0] * shape[1]).view(shape[0], shape[1], 1)
        for name, shape in shapes.items()
    }
    names_by_storage = {numbers.untyped_storage()._cdata: name for name, numbers in rows.items()}
    owners, placements = _owners(model, shapes), {}
    for name, numbers in revert_weight_conversion(model, dict(rows)).items():
        if names_by_storage.get(numbers.untyped_storage()._cdata) and numbers.ndim == 3:
            continue  # only renamed
        fused = owners[name]
        experts, height, width = shapes[fused]
        first, count = int(numbers.flatten()[0]), numbers.numel()
        in_order = torch.arange(first, first + count)
        if numbers.shape != (count, 1) or not torch.equal(numbers.flatten(), in_order):
            raise ModelError(
                f"{name}: transformers does more than split {fused} into rows; this model "
                "cannot be sharded"
            )
        start = (first // height, first % height, 0)
        placements[name] = FusedPlacement(fused, (experts, height, width), start, (count, width))
    return placements


def names_unless_split(model: PreTrainedModel, fused: Collection[str]) -> dict[str, str]:
    """The names in the files of parameters that are there as they are in memory. Raises
    ``ModelError`` if one is transposed."""
    names = {}
    for name in fused:
        with torch.device("meta"):
            parameter = torch.empty(model.get_parameter(name).shape)
        parts = revert_weight_conversion(model, {name: parameter})
        for in_files, tensor in parts.items() if len(parts) == 1 else ():
            if tensor.shape != parameter.shape or not tensor.is_contiguous():
                raise ModelError(f"{in_files}: transformers transposes it when it is loaded")
            names[name] = in_files
    return names


def _owners(model: PreTrainedModel, shapes: dict[str, torch.Size]) -> dict[str, str]:
    """The parameter of each tensor in the files."""
    with torch.device("meta"):
        return {
            name: fused
            for fused, shape in shapes.items()
            for name in revert_weight_conversion(model, {fused: torch.empty(shape)})
        }


def view(fused: torch.Tensor, at: FusedPlacement, cuts: Cuts | None) -> torch.Tensor:
    """This rank's part of a slice of ``fused``, sharing its memory.

    As a tensor it seems to be complete on every rank, which is not so: only ``cuts`` has its
    sharding.
    """
    if not isinstance(fused, DTensor):
        raise ModelError(f"{at.fused}: not sharded, but other parameters are")
    mesh = fused.device_mesh
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    place = dict(zip(names, mesh.get_coordinate() or (), strict=True))
    assert cuts is not None
    assert not isinstance(cuts, tuple)
    (expert, row, column), _ = local_offset_and_shape(at.whole, cuts.cuts, sizes, place)
    start, shape = local_offset_and_shape(at.shape, cuts, sizes, place)
    local = fused.to_local()
    if not all(shape):
        mine = local.new_empty(shape)
    else:
        mine = local[at.start[0] - expert]
        mine = mine.narrow(0, at.start[1] + start[0] - row, shape[0])
        mine = mine.narrow(1, at.start[2] + start[1] - column, shape[1])
    return DTensor.from_local(
        mine,
        mesh,
        [Replicate()] * mesh.ndim,
        run_check=False,
        shape=torch.Size(at.shape),
        stride=(at.shape[1], 1),
    )


Tensors = Mapping[str, torch.Tensor]


class UndividedWeights:
    """What checkpoints ask of weights that no pipeline divides."""

    cuts: Mapping[str, Cuts]  # by name, of what is spread

    def cuts_of(self, name: str) -> Cuts | None:
        """The sharding of a tensor; None if it is not recorded."""
        return self.cuts.get(name)

    def is_copy(self, name: str) -> bool:
        """No other pipeline stage has it."""
        return False

    def like(self, name: str) -> torch.Tensor | None:
        """None: every tensor is there from the beginning."""
        return None


@dataclass(frozen=True)
class FullWeights(UndividedWeights):
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
        return super().cuts_of(name)

    @cached_property
    def _fused(self) -> dict[str, FusedPlacement]:
        return places(self.model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors under the names of the model's Hugging Face files; of sharded ones,
        slices of fused tensors are views."""
        live, parts = self._own(), {}
        if any(isinstance(tensor, DTensor) for tensor in live.values()):
            parts = {n: view(live[at.fused], at, self.cuts_of(n)) for n, at in self._fused.items()}
            divided = {at.fused for at in self._fused.values()}
            live = {name: tensor for name, tensor in live.items() if name not in divided}
        renamed: dict[str, torch.Tensor] = revert_weight_conversion(self.model, live)
        return {**renamed, **parts}

    @torch.no_grad()
    def load_state_dict(self, state: Tensors) -> None:
        """Copy ``state`` into it. Raises ``CheckpointError`` if it is of another model."""
        live = self._own()
        if state.keys() != live.keys():
            live = self.state_dict()
            _check_names(state, live)
            if not any(isinstance(tensor, DTensor) for tensor in live.values()):
                # let transformers fuse and rename it as it does when it loads a folder
                fresh = type(self.model).from_pretrained(
                    None, config=self.model.config, state_dict=dict(state), dtype=self.model.dtype
                )
                self.model.load_state_dict(fresh.state_dict(), strict=not self.apart)
                return
        for name, tensor in live.items():
            if tensor is not state[name] and not _is_same(tensor, state[name]):
                tensor.copy_(state[name])

    def _own(self) -> dict[str, torch.Tensor]:
        """The live tensors by the names of modules, tied ones once."""
        left_out = {*self.model.all_tied_weights_keys, *self.apart}
        return {name: t for name, t in self.model.state_dict().items() if name not in left_out}


@dataclass(frozen=True)
class AdapterWeights(UndividedWeights):
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
    return local(a).data_ptr() == local(b).data_ptr()


def trained(model: nn.Module, in_files: Tensors) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, each under its name in the weight files if it has one there."""
    names = names_in_files(model, in_files)
    return [(names[name], p) for name, p in model.named_parameters() if p.requires_grad]


def names_in_files(model: nn.Module, in_files: Tensors) -> dict[str, str]:
    """For each parameter of ``model`` its name in the weight files, or else its own."""
    file_names = {place(tensor): name for name, tensor in in_files.items()}
    return {name: file_names.get(place(p), name) for name, p in model.named_parameters()}


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


_CONFIG, _TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_EXPERTS = "num_experts"
STRAY = ("is_local", "local_files_only")  # what transformers leaks into tokenizer_config.json


def tokenizer_files(
    tokenizer: PreTrainedTokenizerBase, own: Mapping[str, bytes]
) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and their like.

    ``own`` are the files that it was loaded from. They stay as they are, but for what has changed
    since: what transformers 5 writes in their place, transformers 4 does not open.
    """
    files = saved_files(tokenizer)
    config = {n: v for n, v in json.loads(files[_CONFIG]).items() if n not in STRAY}
    before = saved_files(type(tokenizer).from_pretrained(tokenizer.name_or_path)) if own else {}
    stored = json.loads(own.get(_CONFIG, b"{}"))
    other_templates = {name: data for name, data in before.items() if "/" in name}
    if not own or _vocabulary(files) != _vocabulary(before):
        if config.get("tokenizer_class") == "TokenizersBackend":  # a name of transformers 5
            config["tokenizer_class"] = stored.get("tokenizer_class", "PreTrainedTokenizerFast")
        if isinstance(config.get("extra_special_tokens"), list):  # there, names with their tokens
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        return {**other_templates, **files, _CONFIG: _json(config)}
    config_before = {n: v for n, v in json.loads(before[_CONFIG]).items() if n not in STRAY}
    changed = {name: value for name, value in config.items() if value != config_before.get(name)}
    files, before = ({n: f[n] for n in f if n.endswith(".jinja")} for f in (files, before))
    if not changed and files.items() <= before.items():
        return dict(own)
    if stored.pop("chat_template", None) is None and not changed:
        return {**own, **before, **files}
    tokens = json.loads(own.get(_TOKENS, b"{}"))  # which has precedence in some versions
    tokens |= {name: value for name, value in changed.items() if name in tokens}
    maps = {_TOKENS: _json(tokens)} if tokens else {}
    return {**own, **maps, **before, **files, _CONFIG: _json({**stored, **changed})}


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of ``tokenizer.json`` but for the state of its last call."""
    content = json.loads(files.get("tokenizer.json", b"{}"))
    return {**content, "padding": None, "truncation": None}


def saved_files(processing: Any) -> dict[str, bytes]:
    """What the ``save_pretrained`` of a tokenizer or processor writes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processing.save_pretrained(folder)
        except Exception as error:  # the Rust part of tokenizers knows no OSError
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(Path(folder).parent)) from error
        written = sorted(Path(folder).rglob("*"))
        return {str(p.relative_to(folder)): p.read_bytes() for p in written if p.is_file()}


def model_files(
    model: PreTrainedModel, folder: Path | None, stop_token_ids: Sequence[int]
) -> dict[str, bytes]:
    """``config.json``, ``generation_config.json`` and, for models with custom code, that code.

    Args:
        model: as it is saved, its vocabulary and dtype included.
        folder: where it was loaded from, if it has custom code.
        stop_token_ids: tokens that end a response; added to the end-of-sequence tokens.
    """
    config = _whole_config(model.config)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    code = {} if folder is None else {p.name: read_file(p) for p in sorted(folder.glob("*.py"))}
    files = {"config.json": _json(config), **code}
    if not model.can_generate():
        return files
    generation = json.loads(model.generation_config.to_json_string(use_diff=True))
    eos_ids = generation.get("eos_token_id")
    eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids] if eos_ids is not None else []
    ends = list(dict.fromkeys([*eos_ids, *stop_token_ids]))
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {**files, "generation_config.json": _json(generation)}


def _whole_config(config: PretrainedConfig) -> dict[str, Any]:
    stored = json.loads(config.to_json_string(use_diff=True))
    if config.attribute_map.get(_EXPERTS) in stored:  # where transformers 4 has this name
        stored[_EXPERTS] = stored[config.attribute_map[_EXPERTS]]
    if stored.get("time_step_limit") == [0.0, {"__float__": "Infinity"}]:
        del stored["time_step_limit"]  # the default of 4 and 5, in words that 4 does not read
    return with_old_rope(config.to_dict(), stored)


def adapter_files(model: nn.Module, base: ModelSection | None = None) -> dict[str, bytes]:
    """``adapter_config.json`` as PEFT writes it, but sorted, so that equal runs write equal bytes;
    and ``config.json`` of a base whose positions are extended. Frozen adapters are part of it.

    ``base`` names the model as the user did: a hub id rather than the folder of its download.
    """
    with tempfile.TemporaryDirectory() as folder:
        configs: Any = model.peft_config
        config = configs["default"]
        was_training, config.inference_mode = config.inference_mode, True
        config.save_pretrained(folder)
        config.inference_mode = was_training
        plain = json.loads((Path(folder) / "adapter_config.json").read_text())
    if base is not None:
        plain |= {"base_model_name_or_path": base.path, "revision": base.revision}
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(plain.get(name), list):
            plain[name] = sorted(plain[name])
    if has_frozen(model):
        plain = together(plain, model)
    files = {"adapter_config.json": _json(plain)}
    if base is not None and base.max_positions is not None:
        inner: Any = model.get_base_model()  # type: ignore[operator]
        files["config.json"] = _json(_whole_config(inner.config))
    return files


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
