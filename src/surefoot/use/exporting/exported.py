"""Export a complete model: an adapter merged into its base, or a checkpoint in another dtype.

Weights are copied from file to file box by box, so that memory does not grow with the model. The
folder appears when all of it is written, and opens with ``AutoModelForCausalLM.from_pretrained``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

from ...checkpoint.converting.model_files import configs, read_config
from ...checkpoint.converting.targets.huggingface import refuse_taken
from ...checkpoint.disk.atomic_folder import new_folder, write_small
from ...checkpoint.disk.companions import companions_of
from ...checkpoint.sources.copying import DtypeName, cast, copy
from ...checkpoint.sources.source import TensorSource
from ...model.pretrained.positions import ROPE, old_layers, old_rope
from ...model.pretrained.tokenizer import load_tokenizer
from ...recipe.run_checkpoint import Damaged
from ..model_loading import ModelFolders, find_parts, with_valid
from ..receipts.receipt import Artefact, write_receipt
from .base_model import meta_model
from .merged_model import MergedModel, merged_weights, stop_token_ids
from .reward_model import (
    RewardHead,
    as_sequence_classification,
    head_of,
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
            its own, as the values of PPO, which are omitted otherwise (see ``reward_model``).
        progress: called with the bytes written and the total.

    Raises:
        ModelError: nothing to export there, a missing base, or ``out`` is not empty.
        CheckpointError: damaged weights, an adapter of another model, or a write that fails.
    """
    target = Path(out).expanduser().absolute()

    def write(parts: ModelFolders) -> None:
        source, small = whole_model(
            parts, dtype=dtype, trust_remote_code=trust_remote_code, reward_head=reward_head
        )
        artefact = _artefact(parts, source, small, dtype, reward_head)
        advance = counting(num_bytes(source), progress)
        with new_folder(target, may_be_empty=True) as folder:
            copy(source, folder, max_shard_size=max_shard_size, progress=advance)
            write_small(folder, small)
            write_receipt(folder, parts, artefact)

    def find(damaged: Damaged) -> ModelFolders:
        parts = find_parts(path, base=base, damaged=damaged)
        refuse_taken(target)
        return parts

    with_valid(find, write)
    return target


def counting(total: int, progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    """Calls ``progress`` with the bytes so far, and the ``total``."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return advance


def num_bytes(source: TensorSource) -> int:
    """The bytes of all values."""
    dtypes = source.dtypes()
    return sum(prod(shape) * dtypes[name].itemsize for name, shape in source.shapes().items())


def num_weights(source: TensorSource) -> int:
    """The number of all values."""
    return sum(prod(shape) for shape in source.shapes().values())


def _artefact(
    parts: ModelFolders,
    source: TensorSource,
    small: Mapping[str, bytes],
    dtype: DtypeName | None,
    reward_head: RewardHead,
) -> Artefact:
    """What the receipt says of a Hugging Face folder. Whatever has other bits than the checkpoint
    was rounded: a merged adapter, another dtype, dequantized weights."""
    stored = read_config(parts.model / "config.json")
    is_rounded = parts.adapter is not None or dtype is not None or "quantization_config" in stored
    to = "huggingface" if head_of(parts, reward_head) is None else "reward"
    written = str(json.loads(small["config.json"]).get("dtype"))
    return Artefact(to, written, num_weights(source), is_rounded)


def whole_model(
    parts: ModelFolders,
    *,
    dtype: DtypeName | None = None,
    trust_remote_code: bool = False,
    reward_head: RewardHead = "score",
) -> tuple[TensorSource, dict[str, bytes]]:
    """The weights of a model, with an adapter merged into them, and their companion files."""
    whole = merged_weights(parts, trust_remote_code)
    files: Mapping[str, bytes] = {}
    if (head := head_of(parts, reward_head)) is not None and reward_head == "v_head":
        files = v_head_file(head)
    elif head is not None:
        whole = _scored(parts, whole, head, trust_remote_code)
    source = cast(whole.source, dtype)
    stored = read_config(parts.model / "config.json")
    old = {**old_rope(stored.get(ROPE), str(stored.get("model_type"))), **old_layers(stored)}
    small = {
        **companions_of(parts.model, parts.tokenizer),
        **configs(parts.model, source, {**old, **whole.changes}, whole.stop_token_ids),
        **files,
    }
    return source, small


def _scored(
    parts: ModelFolders, whole: MergedModel, head: TensorSource, trust_remote_code: bool
) -> MergedModel:
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
    return MergedModel(source, changes, whole.stop_token_ids)
