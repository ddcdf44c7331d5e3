"""Export a complete model: an adapter merged into its base, or a checkpoint in another dtype.

Weights are copied from file to file box by box, so that memory does not grow with the model. The
folder appears when all of it is written, and opens with ``AutoModelForCausalLM.from_pretrained``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from transformers import PreTrainedModel

from ...checkpoint.converting.model_files import configs
from ...checkpoint.converting.targets.huggingface import refuse_taken
from ...checkpoint.disk.atomic_folder import new_folder, write_small
from ...checkpoint.disk.companions import companions_of
from ...checkpoint.layouts.adapter_merge import PREFIX, TOKENS, Updated, merged
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.copying import DtypeName, cast, copy
from ...checkpoint.sources.lora import same_values
from ...checkpoint.sources.source import Renamed, TensorSource
from ...errors import CheckpointError
from ...model.pretrained.positions import changed_config, extension_of
from ...model.pretrained.tokenizer import load_tokenizer
from ...model.section import ModelSection
from ...recipe.run_checkpoint import Damaged
from ..model_loading import ModelFolders, find_parts, with_valid
from .adapter_places import updated_tensors
from .base_model import base_weights, meta_model
from .end_tokens import stop_token_ids
from .resized import Grown
from .reward_model import (
    RewardHead,
    as_sequence_classification,
    head_of,
    reward_adapter,
    v_head_file,
)

logger = logging.getLogger(__name__)


def export(
    path: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: DtypeName | None = None,
    max_shard_size: int = 5_000_000_000,
    trust_remote_code: bool = False,
    reward_head: RewardHead = "score",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model at ``path`` (see ``locate``) as a complete model into the new folder ``out``.

    Args:
        path: a run, checkpoint or model; an adapter is merged into its base.
        out: a folder that does not exist or is empty.
        base: the base of an adapter, if it is not where the adapter says.
        dtype: of the weights; unset, as stored (in an adapter's base).
        max_shard_size: largest weight file in bytes.
        trust_remote_code: run code that comes with the model, to learn its tensors' names.
        reward_head: how the head of a reward model is stored: ``score``, or ``v_head`` in a file of
            its own (see ``reward_model``), or as a part of its ``adapter``, which is not merged.
        progress: called with the bytes written and the total.

    Raises:
        ModelError: nothing to export there, a missing base, or ``out`` is not empty.
        CheckpointError: damaged weights, an adapter of another model, or a write that fails.
    """
    target = Path(out).expanduser().absolute()

    def write(parts: ModelFolders) -> None:
        if reward_head == "adapter":
            files = reward_adapter(parts, dtype, trust_remote_code=trust_remote_code)
            with new_folder(target, may_be_empty=True) as folder:
                write_small(folder, files)
            return
        source, small = whole_model(
            parts, dtype=dtype, trust_remote_code=trust_remote_code, reward_head=reward_head
        )
        dtypes, done = source.dtypes(), 0
        total = sum(prod(shape) * dtypes[name].itemsize for name, shape in source.shapes().items())

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        with new_folder(target, may_be_empty=True) as folder:
            copy(source, folder, max_shard_size=max_shard_size, progress=advance)
            write_small(folder, small)

    def find(damaged: Damaged) -> ModelFolders:
        parts = find_parts(path, base=base, damaged=damaged)
        refuse_taken(target)
        return parts

    with_valid(find, write)
    return target


def whole_model(
    parts: ModelFolders,
    *,
    dtype: DtypeName | None = None,
    trust_remote_code: bool = False,
    reward_head: RewardHead = "score",
) -> tuple[TensorSource, dict[str, bytes]]:
    """The weights of a model, with an adapter merged into them, and their companion files."""
    whole = _whole(parts, trust_remote_code)
    files: Mapping[str, bytes] = {}
    if (head := head_of(parts)) is not None and reward_head == "v_head":
        files = v_head_file(head)
    elif head is not None:
        whole = _scored(parts, whole, head, trust_remote_code)
    source = cast(whole.source, dtype)
    small = {
        **companions_of(parts.model, parts.tokenizer),
        **configs(parts.model, source, whole.changes, whole.stop_token_ids),
        **files,
    }
    return source, small


@dataclass(frozen=True)
class _Whole:
    """The weights to write, and the resulting changes of ``config.json``."""

    source: TensorSource
    changes: Mapping[str, object]
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Names:
    """The embedding tensors of a model; ``head`` is stored unless it is tied to ``embed``."""

    embed: str
    head: str | None


def _whole(parts: ModelFolders, trust_remote_code: bool) -> _Whole:
    section = ModelSection(path=str(parts.model), trust_remote_code=trust_remote_code)
    base, dequantized = base_weights(parts.model, section)
    if parts.adapter is None:
        return _Whole(base, dequantized)
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
    return _Whole(source, changes, stop_token_ids(tokenizer))


def _scored(
    parts: ModelFolders, whole: _Whole, head: TensorSource, trust_remote_code: bool
) -> _Whole:
    """A reward model as sequence classification, which pads with a token that ends nothing."""
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=trust_remote_code)
    stops = stop_token_ids(tokenizer)
    pad = tokenizer.pad_token_id
    if pad is None or pad in stops:
        logger.warning(
            "%s: its tokenizer pads with %s, which transformers could not tell from the end token "
            "of a response, so config.json names no pad token: transformers scores one response at "
            "a time",
            parts.tokenizer,
            "nothing" if pad is None else repr(tokenizer.pad_token),
        )
        pad = None
    model = meta_model(parts.model, trust_remote_code)
    source, changes = as_sequence_classification(whole.source, head, model)
    changes = {**whole.changes, **changes, "pad_token_id": pad}
    return _Whole(source, changes, whole.stop_token_ids)


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
