"""What the reference says about every example, asked once before the first step.

The reference is the policy as it is then, so it is asked through the engine that measures, on all
processes, and no second model is ever there; another model, if the recipe names one, is let go
before that which learns is loaded. A run that goes on finds the answers on disk; where
they are gone, it asks the model it began with once more before it takes up its checkpoint.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import nn

from .data.order.micro_batches import Collate, InOrder
from .data.store.cache import default_folder
from .data.store.dataset import EncodedDataset, EncodedStore
from .data.store.reference_logps_store import (
    ReferenceLogpsStore,
    Values,
    stores_of,
    with_reference_logps,
)
from .data.store.run_data import TrainingData
from .errors import ModelError
from .model.precision import choose
from .model.pretrained.loading import PLACES, WEIGHTS, device, resolve
from .model.section import ModelSection
from .parallel.model_runner import Forward
from .parallel.sharded_model import gather_nothing
from .parallel.world import World
from .recipe.recipe import Recipe
from .training.stage import ComparingStage, comparing

logger = logging.getLogger(__name__)
VERSION = 1  # of what is asked, and how
REPORT_SECONDS = 10.0


@dataclass
class ReferenceLogps:
    """What the reference says about the examples of a run, as far as it has been asked."""

    stage: ComparingStage
    micro_batch_size: int
    world: World
    stores: Sequence[EncodedStore]
    kept: Sequence[ReferenceLogpsStore]  # of each store
    known: list[list[Values | None]]  # of each store, by piece
    _told: float = field(default_factory=time.monotonic, init=False)

    @property
    def is_complete(self) -> bool:
        """Whether all has been asked."""
        return all(piece is not None for pieces in self.known for piece in pieces)

    def ask(self, forward: Forward, model: nn.Module, collate: Collate) -> None:
        """Ask ``model``, which ``forward`` runs, what is not known. All processes together.

        Raises:
            ModelError: an answer is not a number.
            DataError: an answer cannot be written.
        """
        if self.is_complete:
            logger.info("reference log-probabilities: loaded from the cache")
            return
        started, was_training = time.monotonic(), model.training
        model.eval()
        for store, kept, known in zip(self.stores, self.kept, self.known, strict=True):
            for number, piece in enumerate(kept.pieces):
                if known[number] is None:
                    known[number] = values = self._asked(forward, store, piece, collate)
                    if self.world.is_main:
                        kept.write(piece, values)
                    self._tell(started)
        gather_nothing(model)
        model.train(was_training)
        seconds = time.monotonic() - started
        logger.info(
            "reference log-probabilities: computed for %s examples in %.1f s",
            f"{self._num_known:,}",
            seconds,
        )

    def blank(self) -> ReferenceLogps:
        """As if it had said 0 of everything: where only speed matters."""
        known: list[list[Values | None]] = [
            [np.zeros((len(piece), 2), np.float32) for piece in kept.pieces] for kept in self.kept
        ]
        return replace(self, known=known)

    def added(self, data: TrainingData) -> TrainingData:
        """The datasets with the answers."""
        values = {
            store.content: np.concatenate([x for x in pieces if x is not None])
            for store, pieces in zip(self.stores, self.known, strict=True)
        }
        return data.changed(partial(with_reference_logps, values=values))

    @torch.no_grad()
    def _asked(
        self, forward: Forward, store: EncodedStore, piece: range, collate: Collate
    ) -> Values:
        """[items, 2] of some items of a store."""
        world, size = self.world, self.micro_batch_size
        dataset = EncodedDataset((store,), np.asarray(piece))
        rank, world_size = world.data_rank, world.num_data_ranks
        batches = InOrder(dataset, collate, micro_batch_size=size, rank=rank, world_size=world_size)
        found = torch.zeros(len(piece), 2, dtype=torch.float64)
        for turn, cpu_batch in enumerate(batches):
            batch = cpu_batch.to(device())
            answers = self.stage.answers(forward(batch), batch).cpu()
            mine = found[size * (turn * world_size + rank) :][: len(answers)]
            mine += answers[: len(mine)]
        values = world.summed(found)
        if not values.isfinite().all():
            raise ModelError(
                "the reference's log-probabilities are no numbers; look at the model and "
                "train.precision"
            )
        return values.float().numpy()

    @property
    def _num_known(self) -> int:
        return sum(len(piece) for pieces in self.known for piece in pieces if piece is not None)

    def _tell(self, started: float) -> None:
        if time.monotonic() - self._told > REPORT_SECONDS:
            self._told = time.monotonic()
            known, total = self._num_known, sum(len(store) for store in self.stores)
            speed = known / (self._told - started)
            logger.info(
                "reference log-probabilities: %d of %d examples, %.0f examples/s",
                known,
                total,
                speed,
            )


def references(
    recipe: Recipe, base: Path, data: TrainingData, world: World
) -> ReferenceLogps | None:
    """What is known of the reference of a run; None if its stage needs none."""
    stage = comparing(recipe.stage)
    if stage is None:
        return None
    root, name = recipe.data.cache_dir or default_folder(), _identity(recipe, base)
    stores = stores_of(data.complete)
    kept = [
        ReferenceLogpsStore(root / "reference" / _key(name, store), len(store)) for store in stores
    ]
    known = [[x.read(piece) for piece in x.pieces] for x in kept] if world.is_main else None
    size = recipe.train.micro_batch_size
    return ReferenceLogps(stage, size, world, stores, kept, world.from_main(known))


def reference_model(recipe: Recipe) -> ModelSection:
    """The model that is the reference: the one to train, or another one."""
    stage, model = comparing(recipe.stage), recipe.model
    if stage is None or stage.reference is None:
        return model
    return replace(model, path=stage.reference, revision=None, adapter=None, quantization_bit=None)


def _key(identity: str, store: EncodedStore) -> str:
    return xxhash.xxh3_128_hexdigest(f"{identity} {store.content}".encode())


def _identity(recipe: Recipe, base: Path) -> str:
    """Another one whenever the reference may be another, or compute otherwise."""
    model = reference_model(recipe)
    base = base if model is recipe.model else resolve(model)
    folders = [base] if model.adapter is None else [base, model.adapter]
    settings = (
        *(model.dtype, model.quantization_bit, model.quantization_type, model.double_quantization),
        *(model.attention, choose(recipe.train.precision), recipe.data.packing),
    )
    parts = [VERSION, [_trace(folder) for folder in folders], [str(value) for value in settings]]
    return json.dumps(parts)


def _trace(folder: Path) -> list[str]:
    """Names, sizes and times of the files that a model is read from; no weight is read for it."""
    kinds = ("config.json", "adapter_config.json", *(f"{place}{WEIGHTS}" for place in PLACES))
    files = {path for kind in kinds for path in folder.glob(kind)}
    stats = [(path.relative_to(folder), path.stat()) for path in sorted(files)]
    return [f"{path}:{s.st_size}:{s.st_mtime_ns}" for path, s in stats]
