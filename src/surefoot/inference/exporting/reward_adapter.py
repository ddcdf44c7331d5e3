"""An adapter of a reward model as PEFT has it for sequence classification: the factors, and the
head as ``score`` among the modules that are saved in full."""

from __future__ import annotations

import json

from safetensors.torch import save

from ...checkpoint.disk.companions import companions_of
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.layouts.sequence_classification import SCORE
from ...checkpoint.sources.copying import DtypeName, cast
from ...checkpoint.sources.joined import JoinedSource
from ...checkpoint.sources.source import Renamed, read_whole
from ...errors import ModelError
from ...recipe.files import ADAPTER, read_text
from ..model_loading import ModelFolders
from .base_model import meta_model
from .reward_model import FILE, head_of, sequence_classification_of

_PREFIX, _HEAD = "base_model.model.", "lm_head"
_NAME = SCORE.removesuffix(".weight")
_LISTS = ("modules_to_save", "target_modules", "target_parameters", "trainable_token_indices")


def adapter_files(
    parts: ModelFolders, dtype: DtypeName | None, *, trust_remote_code: bool
) -> dict[str, bytes]:
    """The files of the adapter. Opens with ``AutoPeftModelForSequenceClassification`` and
    ``num_labels=1``. Raises ``ModelError`` if it is no adapter of a reward model, or adapts the
    output head, which such a model has not."""
    head = None if parts.adapter is None else head_of(parts, "adapter")
    if parts.adapter is None or head is None:
        raise ModelError(
            f"{parts.folder}: --reward-head adapter needs a reward model that was trained with an "
            "adapter (stage: rm, method: lora); leave it out"
        )
    sequence_classification_of(meta_model(parts.model, trust_remote_code))
    factors = open_folder(parts.adapter)
    config = json.loads(read_text(parts.adapter / ADAPTER))
    named = [str(name) for key in _LISTS for name in config.get(key) or () if config.get(key)]
    if any(_HEAD in name for name in (*factors.shapes(), *named)):
        raise ModelError(
            f"{parts.adapter}: adapts {_HEAD}, which a sequence classification has not; export it "
            "merged, with --reward-head score"
        )
    score = Renamed(head, {f"{_PREFIX}{SCORE}": f"{FILE}.weight"})
    source = cast(JoinedSource([("", factors), ("", score)]), dtype)
    tensors = {name: read_whole(source, name) for name in source.shapes()}
    saved = [*(config.get("modules_to_save") or []), _NAME]
    config |= {"task_type": "SEQ_CLS", "modules_to_save": saved}
    return {
        **companions_of(parts.model, parts.tokenizer),
        ADAPTER: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        "adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }
