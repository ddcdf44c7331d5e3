"""Write a model in any form: every target, and the views of a folder that need models to be
located.

Weights are copied from file to file box by box, so that memory does not grow with the model. What
is written appears when all of it is there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path

from ...checkpoint.converting.origin import (
    Done,
    Hints,
    Origin,
    RewardHead,
    Target,
    WholeModel,
    configs,
    read_config,
)
from ...checkpoint.converting.targets import HuggingFaceModel
from ...checkpoint.disk.folder import companions_of
from ...checkpoint.layouts.opening import has_opener, open_any, open_named
from ...checkpoint.sources.copying import DtypeName, Progress, cast, silent
from ...checkpoint.sources.source import TensorSource
from ...model.config import ROPE, old_layers, old_rope
from ...model.tokenizer import load_tokenizer
from ...recipe.run_recipe import Damaged
from .._model_location import locate
from ..model_loading import ModelFolders, find_parts, with_valid
from ._reward_model import as_sequence_classification, head_of, v_head_file
from .merged_model import MergedModel, merged_weights, meta_model, stop_token_ids
from .receipt import Artefact, write_receipt

USUAL = "surefoot"  # where only a layout or mesh is named


@dataclass(frozen=True)
class FolderToConvert:
    """A folder, and what the user said of it."""

    folder: Path
    given: Hints = field(default_factory=Hints)
    exported: ModelFolders | None = None  # of an export: what was found

    @cached_property
    def base(self) -> Path | None:
        """Where ``--base`` leads to."""
        return None if self.given.base is None else locate(self.given.base).folder

    @property
    def reading(self) -> Mapping[str, object]:
        """The options of its layout that the user named."""
        return self.given.reading

    def adapter_base(self) -> Path | None:
        """The folder of an adapter's base; None for a full model."""
        return None if self.parts.adapter is None else self.parts.model

    @cached_property
    def parts(self) -> ModelFolders:
        """The folders of the model."""
        return self.exported or find_parts(self.folder, base=self.given.base)

    def weights(self) -> TensorSource:
        """The weights as stored, under Hugging Face's names."""
        if has_opener(self.folder):
            return open_named(self.folder, self.base, options=self.given.reading)
        return open_any(self.folder, trust_pickle=self.given.trust_pickle)

    def whole(
        self,
        dtype: DtypeName | None = None,
        *,
        reward_head: RewardHead = "score",
        trust_remote_code: bool = False,
    ) -> WholeModel:
        """The model; an adapter is merged into its base."""
        parts = self.parts
        weights, small = whole_model(
            parts, dtype=dtype, trust_remote_code=trust_remote_code, reward_head=reward_head
        )

        def sign(folder: Path) -> None:
            if self.exported is not None:
                artefact = artefact_of(parts, weights, small, dtype, reward_head)
                write_receipt(folder, parts, artefact)

        batch = None if parts.recipe is None else parts.recipe.train.global_batch_size
        return WholeModel(weights, small, parts.model, batch, sign)


def model_folders(origin: Origin) -> ModelFolders:
    """The folders of the model that is written."""
    assert isinstance(origin, FolderToConvert)
    return origin.parts


def export(
    path: str | Path,
    out: str | Path,
    to: Target = HuggingFaceModel(),  # noqa: B008
    *,
    progress: Progress = silent,
) -> Path:
    """Write the model at ``path`` (see ``locate``) as ``to`` says.

    Args:
        path: a run, checkpoint or model; an adapter is merged into its base.
        out: a folder that does not exist or is empty, or a new file.
        to: what is written, and with which options.
        progress: called with numbers of bytes that have been written.

    Raises:
        ModelError: nothing to export there, a missing base, or ``out`` is not empty.
        CheckpointError: damaged weights, an adapter of another model, or a write that fails.
    """
    return export_as(path, out, to, progress)[0]


def export_as(
    path: str | Path, out: str | Path, to: Target, progress: Progress
) -> tuple[Path, Done]:
    """The same, with the notes of the target."""
    target = Path(out).expanduser().absolute()

    def find(damaged: Damaged) -> ModelFolders:
        return find_parts(path, base=to.hints.base, damaged=damaged)

    def write(parts: ModelFolders) -> Done:
        return to.write(FolderToConvert(parts.folder, to.hints, parts), target, progress)

    return target, with_valid(find, write)


def convert(
    folder: Path,
    target: Path,
    to: Target,
    progress: Progress = silent,
    reading: Mapping[str, object] | None = None,
) -> Done:
    """Write ``folder`` as ``to`` says into the new folder ``target``, from file to file: no model
    is built, and memory does not grow with it. Raises ``CheckpointError`` or ``ModelError`` for
    damaged weights, a base that is missing, or a write that fails, ``OptionError`` for options that
    mean nothing for this folder. ``reading`` has options of the folder's layout."""
    hints = replace(to.hints, reading=reading or {})
    return to.write(FolderToConvert(folder, hints), target, progress)


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
