"""The saver of a run: the folder of its checkpoints, and the files beside the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..callbacks.jsonl import NAME as METRICS
from ..callbacks.launches import NAME as LAUNCHES
from ..callbacks.tensorboard import FOLDER as TENSORBOARD
from ..checkpoint.disk.companions import tokenizer_of
from ..data.text.codec import Codec
from ..model.pretrained import companions
from ..model.pretrained.base_identity import BaseModel
from ..network.network import Network
from ..parallel.world import World
from ..recipe.files import RUN_RECIPE
from ..recipe.recipe import Recipe, dump
from ..training.saver import Saver


def build_saver(
    recipe: Recipe, policy: Network, codec: Codec, base: BaseModel, world: World
) -> Saver:
    """The saver of a run: the folder of its checkpoints, and their companions."""
    own = tokenizer_of(Path(codec.tokenizer.name_or_path))
    files = {RUN_RECIPE: dump(recipe).encode(), **companions.tokenizer_files(codec.tokenizer, own)}
    files |= policy.weights.small_files(base.at_commit(), base.folder, codec.stop_token_ids)
    layout = recipe.checkpoint.layout_in(recipe.train.output_dir)
    return Saver(
        output_dir=recipe.train.folder,
        section=replace(recipe.checkpoint, layout=layout),
        kind=policy.weights.kind,
        companions=files,
        steps={
            "log_steps": recipe.train.log_steps,
            "eval_steps": recipe.train.eval_steps,
            "save_steps": recipe.checkpoint.save_steps,
        },
        metric=recipe.train.metric_for_best_model,
        greater=recipe.train.is_greater_better,
        world=world,
        beside=(METRICS, LAUNCHES, TENSORBOARD),
    )
