"""A Hugging Face model: weights, configuration and tokenizer, an adapter merged into its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....errors import ModelError
from ....schema.named_values import ByteSize
from ....storage import files
from ...disk.commit import named, new_folder, write_small
from ...layouts.detection import detect_layout, model_near
from ...sources.copying import Progress, cast, copy
from ..model_files import companions, named_as, refuse_adapter
from ..origin import Done, ModelTarget, Origin, RewardHead


@dataclass(frozen=True)
class HuggingFaceModel(ModelTarget):
    """Weights, configuration and tokenizer; an adapter is merged into its base."""

    max_shard_size: ByteSize = ByteSize(5_000_000_000)
    """Largest weight file, such as 500MB; unset, 5GB. Larger models are split."""

    reward_head: RewardHead = "score"
    """Of a reward model: score (unset), in the layout of AutoModelForSequenceClassification, or a
    file with v_head beside a language model, as other trainers read it. Of a model with the
    values of stage: ppo, v_head writes them, too.
    """

    trust_remote_code: bool = False
    """Run code that comes with the model."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """A full model; weights only if there is no configuration."""
        layout = detect_layout(origin.folder)
        if named(origin.folder) or (layout is not None and layout.is_whole_model):
            return self._write_whole(origin, target, progress)
        return self._write_weights(origin, target, progress)

    def _write_whole(self, origin: Origin, target: Path, progress: Progress) -> Done:
        refuse_taken(target)
        whole = origin.whole(
            self.dtype, reward_head=self.reward_head, trust_remote_code=self.trust_remote_code
        )
        with new_folder(target, may_be_empty=True) as folder:
            copy(whole.weights, folder, max_shard_size=self.max_shard_size, progress=progress)
            write_small(folder, whole.small)
            whole.sign(folder)
        return Done()

    def _write_weights(self, origin: Origin, target: Path, progress: Progress) -> Done:
        source = origin.weights()
        refuse_adapter(origin.folder, source)
        if origin.base is not None:
            source = named_as(source, origin.base)
        source, place = cast(source, self.dtype), origin.base or model_near(origin.folder)
        small = {} if place is None else companions(place, source)
        with new_folder(target) as folder:
            copy(source, folder, max_shard_size=self.max_shard_size, progress=progress)
            write_small(folder, small)
        words = "weights only: its config.json and tokenizer are those of the model it comes from; "
        return Done(words="" if place else words + "--base MODEL copies them")


def refuse_taken(out: Path) -> None:
    """Raise ``ModelError`` unless ``out`` is free or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if files.exists(out):
        raise ModelError(f"{out}: it exists already, and nothing is overwritten; choose another")
