"""A complete model as other programs open it: an adapter merged into its base, with its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from math import prod

from ...checkpoint.converting.model_files import configs, read_config
from ...checkpoint.converting.origin import RewardHead
from ...checkpoint.disk.folder import companions_of
from ...checkpoint.sources.copying import DtypeName, cast
from ...checkpoint.sources.source import TensorSource
from ...model.config import ROPE, old_layers, old_rope
from ...model.tokenizer import load_tokenizer
from ..model_loading import ModelFolders
from ..receipts.receipt import Artefact
from .base_model import meta_model
from .merged_model import MergedModel, merged_weights, stop_token_ids
from .reward_model import (
    as_sequence_classification,
    head_of,
    v_head_file,
)

logger = logging.getLogger(__name__)


def num_weights(source: TensorSource) -> int:
    """The number of all values."""
    return sum(prod(shape) for shape in source.shapes().values())


def artefact_of(
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
