"""The weights of a model with its adapter merged into them, and the changes of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from ...checkpoint.layouts.adapter_merge import PREFIX, TOKENS, Updated, merged
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.lora import same_values
from ...checkpoint.sources.source import Renamed, TensorSource
from ...errors import CheckpointError
from ...model.pretrained.positions import changed_config, extension_of
from ...model.pretrained.tokenizer import load_tokenizer
from ...model.section import ModelSection
from ..model_loading import ModelFolders
from .adapter_places import updated_tensors
from .base_model import base_weights, meta_model
from .end_tokens import stop_token_ids
from .resized import Grown


@dataclass(frozen=True)
class MergedModel:
    """The weights to write, and the resulting changes of ``config.json``."""

    source: TensorSource
    changes: Mapping[str, object]
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Names:
    """The embedding tensors of a model; ``head`` is stored unless it is tied to ``embed``."""

    embed: str
    head: str | None


def merged_weights(parts: ModelFolders, trust_remote_code: bool) -> MergedModel:
    """The weights of ``parts`` as one model. Raises ``CheckpointError`` if they do not merge."""
    section = ModelSection(path=str(parts.model), trust_remote_code=trust_remote_code)
    base, dequantized = base_weights(parts.model, section)
    if parts.adapter is None:
        return MergedModel(base, dequantized)
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=trust_remote_code)
    model = meta_model(parts.model, trust_remote_code)
    names = _names(model)
    old = base.shapes().get(names.embed, (0,))[0]
    grown = _grow(base, names, len(tokenizer))
    updated = updated_tensors(model, parts.adapter)
    source, is_untied = _merge(grown, parts.adapter, names, updated)
    rows = source.shapes().get(names.embed, (0,))[0]
    section = replace(section, **extension_of(parts.adapter))
    changes = {**dequantized, **changed_config(parts.model, section)}
    changes |= {"vocab_size": rows} if rows != old else {}
    if is_untied:
        changes["tie_word_embeddings"] = False
    return MergedModel(source, changes, stop_token_ids(tokenizer))


def _names(model: PreTrainedModel) -> _Names:
    """The names of the embeddings."""
    modules = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    embed = modules[id(model.get_input_embeddings())]
    return _Names(f"{embed}.weight", None if head is None else f"{modules[id(head)]}.weight")


def _grow(base: TensorSource, names: _Names, rows: int) -> TensorSource:
    """``base`` with an embedding for every token of the tokenizer, initialized as in training."""
    stored = base.shapes()
    present = [name for name in (names.embed, names.head or "") if name in stored]
    if not present or stored[present[0]][0] >= rows:
        return base
    return Grown(base, frozenset(present), rows)


def _merge(
    base: TensorSource, adapter: Path, names: _Names, updated: Mapping[str, Updated]
) -> tuple[TensorSource, bool]:
    """The merge, and whether it untied the embeddings. PEFT may train only one of two tied
    embeddings, or each for itself; then both are stored. If they are equal
    (``ensure_weight_tying``), they stay tied."""
    stored = base.shapes()
    is_tied = names.head is not None and names.head not in stored and names.embed in stored
    touched = _touched(adapter, names) if is_tied else set()
    if not touched or names.head is None:
        return merged(base, adapter, updated), False
    if any(key.endswith(TOKENS) for key in open_folder(adapter).shapes()):
        raise CheckpointError(
            f"{adapter}: trains rows of tied embeddings, and {min(touched)} in another way; merge "
            "it with peft's own merge_and_unload()"
        )
    everything = {name: name for name in stored}
    both = merged(Renamed(base, {**everything, names.head: names.embed}), adapter, updated)
    if len(touched) > 1 and same_values(both, names.embed, names.head):
        return Renamed(both, everything), False
    return both, True


def _touched(adapter: Path, names: _Names) -> set[str]:
    """The embeddings that the adapter changes."""
    stored = [key.removeprefix(PREFIX) for key in open_folder(adapter).shapes()]
    keys = [key for key in stored if not key.endswith(TOKENS)]  # PEFT keeps these tied
    pair = [name for name in (names.embed, names.head) if name is not None]
    return {name for name in pair if any(k.startswith(name.removesuffix("weight")) for k in keys)}
