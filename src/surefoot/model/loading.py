"""Load a pretrained model from a folder or a hub: checked and complete, or a clear error.

On the meta device a model has its modules, dtypes and tied weights without allocating memory.
transformers itself loads it, from meta tensors with the names, shapes and dtypes of those in the
files. So it renames, converts, ties and reports errors as for any model, and reads no values.

A model's code can be run there (``on_meta``): what it does with tensors, whatever they contain.
Whether the model has memory or not, meta tensors take the place of its own meanwhile. So the answer
is the same in a first start and in a resumed one, and nothing that the code does to itself stays.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from ..errors import ModelError, counted
from ..storage import files
from ..storage.remote import HUBS, HubError, is_address
from ..storage.weight_files import is_adapter
from .config import (
    CONFIG,
    NO_MODEL_AT_ALL,
    as_dequantized,
    auto_class,
    dequantization,
    disable_relayout,
    quantization,
    quantization_of,
    read_config,
    why_no_model,
)
from .section import ModelSection
from .tokenizer import new_token_ids
from .unloaded_tensors import of_added_layers
from .weights import place

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
WEIGHTS = "*.safetensors"
PLACES = ("", "rank_0*/", "checkpoint/rank_0*/", "iteration_*/")  # ours, MindSpore's
FILES = ("*.json", WEIGHTS, "*.jinja", "*.model", "*.txt", "*.py", "*recipe.yaml")  # never pickles
_NOT_NEEDED = ("optimizer*.safetensors", "*/optimizer*.safetensors")  # of checkpoints of Surefoot
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device() -> torch.device:
    """The GPU of this process if there is one, otherwise the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def resolve(section: ModelSection, *, weights: bool = True) -> Path:
    """The local folder of a model: ``section.path`` itself, or its files downloaded from the hub.

    Without ``weights``, configuration and tokenizer are enough.

    Raises:
        ModelError: no such folder and no such hub model, or a folder without safetensors weights.
    """
    if section.new_weights and weights:
        raise ModelError(
            f"model.new_weights: {section.path} has no weights before `surefoot train` makes them; "
            "name a checkpoint of the run, or new-weights-… in its folder"
        )
    if is_address(section.path):
        raise ModelError(
            f"model.path: {section.path} is a URL; expected a folder or a hub id. Write its latest "
            f"checkpoint to a folder with `surefoot export {section.path} FOLDER`, and name that"
        )
    local = Path(section.path)
    if section.new_weights and local.name == CONFIG and local.is_file():
        local = local.parent
    folder = local if files.exists(local) else fetch(section, weights=weights)
    if not files.is_folder(folder):
        raise ModelError(
            f"model.path: {folder} is a file; expected the folder that contains config.json"
            f"{' and a tokenizer, or that file itself' if section.new_weights else ''}"
        )
    if is_adapter(folder):
        raise ModelError(
            f"model.path: {folder} is an adapter; set model.adapter to it, and model.path to its "
            "base"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path: no config.json in {folder}; expected a Hugging Face model folder"
        )
    if weights:
        _refuse_pickles(folder)
    return folder


def fetch(section: ModelSection, *, weights: bool = True, inside: str = "") -> Path:
    """The files of a hub model (or adapter) in the local cache, without pickles; of one folder
    ``inside`` it, or all."""
    patterns = [f"{inside}{name}" for name in FILES if weights or name != WEIGHTS]
    try:
        return HUBS[section.hub].snapshot(
            "models",
            section.path,
            revision=section.revision,
            patterns=patterns,
            ignored=_NOT_NEEDED,
        )
    except HubError as error:
        raise ModelError(f"model.path: no folder {section.path!r}, and {error}") from None


def _refuse_pickles(folder: Path) -> None:
    if any(path for place in PLACES for path in folder.glob(f"{place}{WEIGHTS}")):
        return
    if old := [path for place in PLACES for path in folder.glob(f"{place}*.ckpt")]:
        raise ModelError(
            f"model.path: {old[0]}: neither pickles nor MindSpore's older format are read; convert "
            "it once, with mindspore.ckpt_to_safetensors or the program that wrote it"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"model.path: {folder} holds its weights as {pickles[0]}, a pickle, which can run code "
            "when read. If you trust it, write safetensors beside it once: python -c "
            f'"from transformers import AutoModelForCausalLM as M; M.from_pretrained('
            f"'{folder}', weights_only=True).save_pretrained('{folder}')\""
        )
    raise ModelError(
        f"model.path: no *.safetensors in {folder}; the weights are missing. To train "
        "from random ones, set model.new_weights: true"
    )


def load_model(
    folder: Path,
    section: ModelSection,
    *,
    dtype: torch.dtype | Literal["auto"],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """The causal language model in ``folder``, on this process's device, in evaluation mode.

    ``weights`` are passed if the files in ``folder`` have a form that transformers cannot read. If
    they are on the meta device, so is the model.

    Raises:
        ModelError: not a causal language model, or weights that are missing, unexpected or damaged.
    """
    attention = None if section.attention == "auto" else section.attention
    is_empty = weights is not None and any(tensor.is_meta for tensor in weights.values())
    quantized = None if is_empty else quantization(section)
    placed = None if quantized is None else {"": device()}  # if not on the CPU first
    placed = {"": torch.device("meta")} if is_empty else placed
    disable_progress_bar()  # of transformers; the screen is ours
    try:
        config = read_config(folder, section)
        stored = dequantization(config, section, folder)
        config = as_dequantized(config)  # of those forms, ``weights`` has the values
        opened = auto_class(config)
        if weights is not None:  # the general class would look for files
            opened = opened._model_mapping[type(config)]
        model, info = opened.from_pretrained(
            folder if weights is None else None,
            state_dict=None if weights is None else dict(weights),
            config=config,
            dtype=dtype,
            device_map=placed,
            quantization_config=quantized or stored,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=section.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with their names
            output_loading_info=True,
        )
        if weights is not None:
            _name(model, folder)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(
            f"{folder}: damaged or truncated file: {error}; fetch the model again"
        ) from None
    except NO_MODEL_AT_ALL as error:
        reason = why_no_model(error, folder)
        raise ModelError(f"{folder}: cannot load the model: {reason}") from None
    _check_complete(folder, info, model)
    if quantized is not None:
        disable_relayout(model)
    is_there = is_empty or quantized is not None
    return (model if is_there else model.to(device())).eval()


def _name(model: PreTrainedModel, folder: Path) -> None:
    """Settings that a model takes from its folder when it is loaded from there."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if model.can_generate():
        is_there = (folder / "generation_config.json").is_file()
        other = {} if is_there else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(folder, **other)


def _check_complete(folder: Path, info: dict[str, object], model: PreTrainedModel) -> None:
    for kind, advice in (
        ("missing_keys", "the model needs them and would initialize them randomly"),
        ("unexpected_keys", "they are of another architecture than config.json says"),
        ("mismatched_keys", "their shapes are not what config.json says"),
    ):
        names = sorted(str(name) for name in info.get(kind) or ())  # type: ignore[attr-defined]
        if kind == "unexpected_keys":  # what ``unloaded`` names, exports keep
            names = sorted({*names} - of_added_layers(names, model))
        if names:
            raise ModelError(
                f"{folder}: {counted(len(names), 'tensor')} {kind.removesuffix('_keys')} "
                f"({names[0]}): {advice}"
            )


def training_dtype(section: ModelSection) -> torch.dtype | Literal["auto"]:
    """The dtype in which to load weights, before a method selects the trainable ones."""
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    return "auto" if torch.cuda.is_available() else torch.float32


def upcast_trained(model: nn.Module, section: ModelSection) -> None:
    """With ``dtype: auto``, trainable weights become float32, which loses no small updates."""
    if section.dtype == "auto":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give new tokens of the tokenizer rows in the embeddings: those of the padding of a padded
    vocabulary, then further ones. They begin as the mean of the rows of all tokens before.

    Never shrinks them. Returns whether there is a new token.
    """
    before = model.get_input_embeddings().num_embeddings
    ids = [*new_token_ids(tokenizer), *range(before, len(tokenizer))]
    if not ids:
        return False
    rows = vars(model)[_ROWS] = range(min(ids), max(ids) + 1)
    if len(tokenizer) > before:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    for weight in {id(m.weight): m.weight for m in embeddings if m is not None}.values():
        weight[rows.start : rows.stop] = weight[: rows.start].float().mean(0).to(weight.dtype)
    logger.info(
        "%s embeddings: %s, initialized to the mean of the %d old ones",
        "resized" if len(tokenizer) > before else "padded",
        counted(len(rows), "new token"),
        rows.start,
    )
    return True


def new_rows(model: PreTrainedModel) -> range:
    """The rows of the embeddings that ``grow_embeddings`` has given to new tokens."""
    rows: range = vars(model).get(_ROWS, range(0))
    return rows


_ROWS = "_surefoot_new_rows"
Tensors = Mapping[str, torch.Tensor]


def why_not_empty(folder: Path, section: ModelSection) -> str | None:
    """Why the model in ``folder`` can only be loaded in full; None if in shards, too."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    is_theirs = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    has_ours = type(config) in auto_class(config)._model_mapping
    if not has_ours or (is_theirs and section.trust_remote_code):
        return "it has custom code"
    if quantization_of(as_dequantized(config)) is not None:
        return "its weights are quantized"
    return None


def fill_buffers(model: PreTrainedModel) -> str | None:
    """Give the buffers of a meta ``model`` that are in no file the values that the architecture
    initializes them with, on the CPU. Returns the name of one that it does not initialize: such a
    model must be loaded in full."""
    buffers, again = (_initialized_over(model, is_first=is_first) for is_first in (True, False))
    for name, values in buffers.items():
        if not torch.equal(values.nan_to_num(), again[name].nan_to_num()):
            return name
    return None


def _initialized_over(model: PreTrainedModel, *, is_first: bool) -> dict[str, torch.Tensor]:
    """The buffers after initialization over one of two fillings: what differs afterwards is what
    was in memory before."""
    buffers = {}
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        filler = 0 if is_first else 1
        buffers[name] = torch.full_like(buffer, filler, device="cpu")
        model.get_submodule(parent)._buffers[leaf] = buffers[name]
    for module in model.modules():  # all: a model may initialize the buffers of its layers
        module._is_hf_initialized = False  # as transformers marks it
    model.initialize_weights()
    return dict(model.named_non_persistent_buffers())


def names_stored(model: PreTrainedModel, stored: Tensors) -> dict[str, str]:
    """For each tensor of ``model``, tied ones once, the name in the files of that with its values,
    unless it is fused from several."""
    prefix = f"{model.base_model_prefix}."  # which files of the bare model do not have
    names_at: dict[object, list[str]] = {}
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        names = names_at.setdefault((place(tensor), tensor.shape), [])
        names += [n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored]
    places = {name: names_at.get((place(t), t.shape), []) for name, t in kept_tensors(model)}
    return {name: names[0] for name, names in places.items() if names}


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that are saved in files of ``model``, tied ones once."""
    yield from model.named_parameters()
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device``; meta tensors get memory, and tied weights stay tied."""
    first = {id(p): name for name, p in model.named_parameters()}
    tied = [
        (name, first[id(p)])
        for name, p in model.named_parameters(remove_duplicate=False)
        if first[id(p)] != name
    ]
    move = lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)  # noqa: E731
    model._apply(move)  # type: ignore[no-untyped-call]
    for name, same in tied:
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._parameters[leaf] = model.get_parameter(same)


class CapturedInit(TorchFunctionMode):
    """While it is active, values of tensors that are moved or copied to the meta device are
    captured: so PEFT initializes an adapter for a meta model with its own random numbers. Of a copy
    of a meta tensor, it is captured which one that was."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}  # the key stays alive
        self._sources: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The captured values of ``tensor``, which is on the meta device."""
        _, values = self._values.get(place(tensor), (None, None))
        return values if values is not None and values.shape == tensor.shape else None

    def source_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The meta tensor of which ``tensor`` is a copy."""
        _, source = self._sources.get(place(tensor), (None, None))
        return source if source is not None and source.shape == tensor.shape else None

    def __torch_function__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if func in (torch.Tensor.to, torch.Tensor.copy_) and result.is_meta:
            source = args[0] if func is torch.Tensor.to else args[1]
            assert isinstance(source, torch.Tensor)
            values = self.of(source) if source.is_meta else source.detach()
            if values is not None:
                self._values[place(result)] = result, values.to(result.dtype)
            elif func is torch.Tensor.copy_:
                self._sources[place(result)] = result, source
        if func is torch.Tensor.zero_ and result.is_meta:
            zero = torch.zeros((), dtype=result.dtype, device="cpu")
            self._values[place(result)] = result, zero.expand(result.shape)
        return result


# What code reads of a meta tensor; control flow that depends on it takes either branch.
_READ = {
    torch.Tensor.item: 0,
    torch.Tensor.__bool__: False,
    torch.Tensor.__contains__: False,
    torch.Tensor.__int__: 0,
    torch.Tensor.__index__: 0,
    torch.Tensor.__float__: 0.0,
}


def once_per_architecture(
    ask: Callable[[PreTrainedModel], Answer],
) -> Callable[[PreTrainedModel], Answer]:
    """``ask``, whose answer follows from the class and the configuration of a model alone, asked
    once for each. A run opens its model twice: on the meta device, to find mistakes early, and on
    its own."""
    answers: dict[tuple[object, ...], Answer] = {}

    @wraps(ask)
    def answer(model: PreTrainedModel) -> Answer:
        config = model.config
        described = json.dumps(
            config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str
        )
        key = (type(model), config._attn_implementation, described)
        if key not in answers:
            answers[key] = ask(model)
        return answers[key]

    return answer


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """While it lasts, all tensors of ``model`` are on the meta device, tied ones tied. Afterwards
    its own are back, also where its code has put others in their place."""
    originals = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    blanks: dict[int, torch.Tensor] = {}

    def blank(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in blanks:
            # one type for all: grouped products of experts have no other there
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_like(tensor, device="meta", dtype=dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            new = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            blanks[id(tensor)] = new
        return blanks[id(tensor)]

    try:
        for module, attributes, parameters, buffers in originals:
            for name, parameter in parameters.items():
                module._parameters[name] = None if parameter is None else blank(parameter)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else blank(buffer)
            vars(module).update(
                {n: blank(t) for n, t in attributes.items() if type(t) is torch.Tensor}
            )
        with _Readable():
            yield
    finally:
        for module, attributes, parameters, buffers in originals:
            _restore(vars(module), attributes)
            _restore(module._parameters, parameters)
            _restore(module._buffers, buffers)


def _restore(changed: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in changed.keys() - before.keys():
        del changed[name]
    changed.update(before)


class _Readable(TorchFunctionMode):
    """Numbers that are read from meta tensors are 0."""

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READ and args[0].device.type == "meta":
            return _READ[func]
        return func(*args, **(kwargs or {}))
