"""What a folder of weights is, a model or an adapter, and what its tensors are called.

``torch.compile``, FSDP, DDP and activation checkpointing replace a module by another that contains
it, and a state that is saved without unwrapping has the names of both. PEFT's live names contain
the name of the adapter, those of its files do not. Every reader of weights takes the plain names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, ModelError
from . import files

_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MODEL = (  # of transformers, in one file or several; of a sharded checkpoint
    *("model.safetensors", "model.safetensors.index.json"),
    "rank_00000/model.safetensors",
)


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` has the settings of an adapter, by names alone. Raises ``ModelError`` if
    it has the weights of a model as well, and is neither: it is usually a merged model whose
    adapter was left in it, and programs differ in what they open."""
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


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """The ``safe_open`` of a file of tensors. Raises ``ModelError``: it is no such file."""
    try:
        files.open_file(path).close()  # the library would wait for who writes into a pipe
        file = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: damaged or truncated file: {error}; fetch the model again"
        ) from None
    with file:
        yield file


ADAPTER_PREFIX = "base_model.model."
# Of torch.compile, FSDP 1, activation checkpointing, Lightning Fabric, and FSDP of torch 1.
_WRAPPERS = frozenset(
    {
        *("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
        *("_forward_module", "_fpw_module"),
    }
)
_PARALLEL = "module."  # of DDP and DeepSpeed; only where every name begins with it
# What PEFT begins the names of an adapter's tensors with, by its kind.
KINDS = (
    *("lora", "adamss", "boft", "c3a", "delora", "fourierft", "gralora", "hada", "hira", "hra"),
    *("ia3", "lokr", "miss", "oft", "pvera", "randlora", "road", "shira", "vblora", "vera"),
    "waveft",
)
_KIND = rf"\.(?:{'|'.join(KINDS)})_"
_ADAPTED = re.compile(rf"{_KIND}|\.modules_to_save\.|\.trainable_tokens_delta(?:\.|$)")
_ORIGINAL = re.compile(r"\.original_module\.|\.trainable_tokens_original(?:\.|$)")  # the base's
# What has the name of the adapter in it, and the same without.
_WITH_ADAPTER = (
    (re.compile(r"(\.lora_magnitude_vector)\.[^.]+(?:\.weight)?$"), r"\1"),
    (re.compile(rf"({_KIND}\w+)\.[^.]+(\.(?:weight|bias))$"), r"\1\2"),
    (re.compile(rf"({_KIND}\w+)\.(?!weight$|bias$)[^.]+$"), r"\1"),  # a parameter, no module
    (re.compile(r"(\.trainable_tokens_delta)\.[^.]+$"), r"\1"),
    (re.compile(r"\.modules_to_save\.[^.]+\."), "."),
)


def is_adapted(name: str) -> bool:
    """Whether PEFT has added the tensor to a model."""
    return _ADAPTED.search(name) is not None


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name in a file by the name that its tensor has without wrappers. Raises
    ``CheckpointError`` if two tensors would have one name."""
    unwrapped = {
        name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names
    }
    for front in (_PARALLEL, ADAPTER_PREFIX + _PARALLEL):
        while unwrapped and all(name.startswith(front) for name in unwrapped.values()):
            prefix = front.removesuffix(_PARALLEL)
            unwrapped = {old: prefix + name[len(front) :] for old, name in unwrapped.items()}
    return _by_new_name(unwrapped)


def adapter_names(names: Iterable[str], *, has_biases: bool = True) -> dict[str, str]:
    """The same for an adapter, under the names of ``adapter_model.safetensors``. Of the state of a
    full model with an adapter, those of the adapter; ``has_biases``: and biases, which may be
    trained (``bias`` of LoRA)."""
    plain = {stored: name for name, stored in plain_names(names).items()}
    if any(ADAPTER_PREFIX in name for name in plain.values()):  # before it is a module around PEFT
        plain = {old: name[max(0, name.find(ADAPTER_PREFIX)) :] for old, name in plain.items()}
    elif any(map(is_adapted, plain.values())):
        plain = {old: ADAPTER_PREFIX + name for old, name in plain.items()}
    is_live = any(form.search(name) for name in plain.values() for form, _ in _WITH_ADAPTER)
    if is_live:
        plain = {old: name for old, name in plain.items() if not _ORIGINAL.search(name)}
    if is_live and _has_base(plain.values()):
        plain = {
            old: name
            for old, name in plain.items()
            if is_adapted(name) or (has_biases and name.endswith(".bias"))
        }
    for form, replacement in _WITH_ADAPTER:
        plain = {old: form.sub(replacement, name) for old, name in plain.items()}
    return _by_new_name(plain)


def _has_base(names: Iterable[str]) -> bool:
    """Whether the weights of all layers that an adapter changes are among ``names``."""
    all_names = list(names)
    layers = {name.partition(".base_layer.")[0] for name in all_names if ".base_layer." in name}
    parts = [re.split(_KIND, name) for name in all_names]
    return {layer for layer, *of_adapter in parts if of_adapter} <= layers


def _by_new_name(renamed: Mapping[str, str]) -> dict[str, str]:
    old_names: dict[str, str] = {}
    for old, new in renamed.items():
        if new in old_names:
            raise CheckpointError(
                f"{old_names[new]!r} and {old!r} are both {new!r} without the names of wrappers "
                "and adapters; expected one model or adapter in a file"
            )
        old_names[new] = old
    return old_names
