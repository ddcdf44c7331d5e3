"""What a run is made of, understood once from its recipe: ``RunParts.of``.

Nothing large is loaded here: folders, settings, a tokenizer, hashes of files. What is wrong with
them is an error here, before data is encoded, which may take hours. Everything below takes these
parts, or one of them, and no recipe.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from ..batch import Probe, without_labels
from ..checkpoint.disk.commit import step_of
from ..checkpoint.fetching import is_outline
from ..checkpoint.section import CheckpointSection
from ..data.order.micro_batches import Collation
from ..data.section import DataSection
from ..data.text.codec import Codec
from ..data.text.collation import collate
from ..data.training_data import AnyData, Encoding
from ..errors import DamagedFileError, RecipeError
from ..generate.section import GenerateSection
from ..log import fell_back
from ..model.base_identity import BaseModel
from ..model.config import read_config
from ..model.numerics import choose, replaced
from ..network.draft import NetworkOptions
from ..network.early import refuse_early
from ..optim.optimizer import Optimizer
from ..parallel.section import ParallelSection
from ..parallel.world import World
from ..recipe.comparison import compare_with_checkpoint
from ..recipe.recipe import Recipe, dump, greater_is_better, refuse_unknown_metric, with_metric
from ..recipe.recipe_data import (
    build_codec,
    encoding_of,
    find_base,
    fitted_data,
    open_codec,
    open_tokenizer,
    settled,
)
from ..storage.files import digest
from ..training.precompute import model_of
from ..training.restoring import restore
from ..training.section import TrainSection
from ..training.stage import Stage, longest_row
from ..training.trainer import Trainer
from ..training.views import Shown
from ._encoder_worker import EncoderWorker
from .apart import DamagedStartError
from .bases import find_bases
from .code_files import NAME as CODE
from .code_files import check_code, code_of
from .folder import hash_of_settings, recipe_of
from .foreign_resume import ForeignTrainer, detect_trainer
from .from_python import AS_IN_THE_RECIPE, StageParts
from .models import NO_FOLDERS, ModelParts, RunModels, refuse_other_tokens
from .resolving import resolved
from .trainer_names import argument_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run is resumed from."""

    folder: Path
    writer: ForeignTrainer | None  # None: Surefoot
    trust_pickle: bool = False
    is_verified: bool = False  # whether every byte of it was checked a moment ago

    @classmethod
    def of(
        cls, folder: Path, world: World, *, trust_pickle: bool = False, is_verified: bool = False
    ) -> Start:
        """The checkpoint in ``folder``, by Surefoot or a trainer that is recognized."""
        writer = detect_trainer(folder, trust_pickle=trust_pickle, pp=world.pp)
        return cls(folder, writer, trust_pickle, is_verified)

    @property
    def has_base(self) -> bool:
        """Whether all that the method may save of the base model is in it."""
        return self.writer is None or not self.writer.needs_base

    def compare(self, recipe: Recipe) -> None:
        """Say what has changed since it was saved. Raises ``RunError`` for what must not."""
        writer = self.writer
        if writer is None:
            before = recipe_of(self.folder)
        else:
            optim, method = writer.trained_with(self.folder, recipe.optim, recipe.method)
            before = replace(recipe, optim=optim, method=method)
        weights = "model.path" if recipe.method.saves_base_model else "model.adapter"
        if before is not None:
            compare_with_checkpoint(self.folder, before, recipe, recipe.train.folder, weights)

    def restore(self, trainer: Trainer, base: BaseModel) -> None:
        """Give ``trainer`` the states of the checkpoint."""
        folder, trust = self.folder, self.trust_pickle
        if self.writer is not None:
            self.writer.load(folder, trainer, base=base, trust_pickle=trust)
        else:
            try:
                restore(folder, trainer.states, trainer.world, is_verified=self.is_verified)
            except DamagedFileError as error:
                if not is_outline(folder):
                    raise
                raise DamagedStartError(step_of(folder), str(error)) from None
        trainer.policy.trained.check(trainer.state.global_step)
        logger.info("resuming from %s at step %d", folder.name, trainer.state.global_step)


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """A run before it is built."""

    stage: Stage
    data: DataSection  # with the cutoff that the model has
    train: TrainSection
    optim: Optimizer
    saves: CheckpointSection
    generate: GenerateSection
    models: RunModels
    codec: Codec
    encoding: Encoding
    encoder: EncoderWorker  # which has not been started
    base: BaseModel  # the policy's, with its identity
    text: str  # the recipe, as checkpoints contain it
    lineage: str
    arguments: Mapping[str, Shown]  # the settings under the names of the Hugging Face Trainer
    record: Mapping[str, bytes] = field(default_factory=dict)  # of code and models, for checkpoints
    start: Start | None = None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        start: Start | None,
        world: World,
        stage_parts: StageParts = AS_IN_THE_RECIPE,
        *,
        is_recorded: bool = True,
    ) -> RunParts:
        """The parts of the run of ``recipe`` that is resumed from ``start``. A collective call.
        Raises what is known to be wrong with them."""
        record = code_of(recipe, recipe.train.callbacks, stage_parts)
        is_own = start is not None and start.writer is None
        bases = find_bases(
            recipe.model,
            recipe.stage,
            start.folder if start is not None and is_own else None,
            saves_base=recipe.method.saves_base_model,
        )
        written = with_metric(settled(recipe, bases.policy.folder))
        recipe = replace(written, stage=stage_parts.of(written.stage))
        codec = build_codec(recipe, bases.policy.folder)
        if start is not None and is_recorded:
            world.on_main(partial(start.compare, written))
        refuse_unknown_metric(recipe)
        parts = cls.around(recipe, codec, bases.policy, bases.folders, written=written)
        if start is None:
            # Truncated weights and tokens without embeddings were once found after hours of
            # encoding.
            world.on_main(partial(parts._refuse, world))
        elif start.writer is not None:
            world.on_main(partial(start.writer.check_weights, start.folder, parts.base))
        if is_recorded and world.is_main:
            record |= bases.record()
        return replace(parts, record=record, start=start)

    @classmethod
    def around(
        cls,
        recipe: Recipe,
        codec: Codec,
        base: BaseModel | Path,
        folders: Mapping[str, Path] = NO_FOLDERS,
        *,
        written: Recipe | None = None,
    ) -> RunParts:
        """The parts of ``recipe`` around a model that is known, or open, already. ``written`` is
        what a file can say of it, if a program has put parts of its own into its stage."""
        written = written or recipe
        metric = str(recipe.train.metric_for_best_model)  # plain text, as a state contains it
        is_greater = greater_is_better(recipe)
        train = replace(recipe.train, greater_is_better=is_greater, metric_for_best_model=metric)
        recipe = replace(recipe, train=train)
        base = BaseModel(recipe.model, base) if isinstance(base, Path) else base
        options = NetworkOptions(
            method=recipe.method,
            parallel=recipe.parallel,
            precision=choose(recipe.train.precision),
            packing=recipe.data.packing,
            seed=recipe.train.seed,
            heads=recipe.stage.heads,
        )
        policy = ModelParts(base.folder, recipe.model, options)
        model = replace(recipe.model, path=str(base.folder))
        return cls(
            stage=recipe.stage,
            data=recipe.data,
            train=recipe.train,
            optim=recipe.optim,
            saves=recipe.checkpoint,
            generate=recipe.generate,
            models=RunModels(recipe.stage, policy, folders),
            codec=codec,
            encoding=encoding_of(recipe, codec),
            encoder=EncoderWorker(partial(dump, replace(recipe, model=model))),
            base=base,
            text=dump(written),
            lineage=hash_of_settings(written, has_plateau=written.optim.follows_evaluations),
            arguments=argument_values(recipe.model, recipe.train, recipe.optim, recipe.checkpoint),
        )

    @classmethod
    def unopened(cls, recipe: Recipe) -> RunParts:
        """The parts of ``recipe`` for what reads no weights, and needs none. Raises as
        ``find_base`` and ``open_codec``."""
        base = find_base(recipe, weights=False)
        return cls.around(recipe, build_codec(recipe, base), base)

    @classmethod
    def to_measure(cls, recipe: Recipe, parallel: ParallelSection | None = None) -> RunParts:
        """The parts of ``recipe`` for its models before the first step, which are only measured,
        on the ranks of ``parallel``. Raises as ``find_base`` and ``open_codec``."""
        recipe = resolved(recipe)
        base = find_base(recipe)
        parts = cls.around(recipe, open_codec(recipe, base), base)
        policy = parts.models.policy
        options = replace(policy.options, method=None, is_trainable=False, only_generates=True)
        options = replace(options, parallel=parallel or ParallelSection())
        section = replace(policy.section, compile=False)
        policy = replace(policy, section=section, options=options)
        return replace(parts, models=replace(parts.models, policy=policy))

    def _refuse(self, world: World) -> None:
        """Raise what is known to be wrong with the models; no weights are read."""
        if why := replaced(self.train.precision):
            what = "train.precision: fp16 is computed in fp32 on a CPU"
            fell_back(what, why, "takes the memory of fp32")
        models, policy = self.models, self.models.policy
        separate = [role for role, m in self.stage.auxiliary.items() if m.model is not None]
        refuse_early(
            policy.folder,
            policy.section,
            policy.options,
            self.optim,
            num_processes=world.size,
            output_dir=self.train.folder,
            tokenizer=self.codec.tokenizer,
            others=[model_of(self.stage.auxiliary[role], policy.section) for role in separate],
        )
        for role in separate:
            parts = models.auxiliary(role)
            tokenizer = open_tokenizer(parts.section, parts.folder)
            refuse_other_tokens(models, role, tokenizer, self.codec)
            config = read_config(parts.folder, parts.section)
            fitted_data(self.data, config, parts.folder)  # has it as many positions?
            size = config.get_text_config().vocab_size
            if models.is_compared(role) and size < len(tokenizer):
                raise RecipeError(
                    f"the {role} {parts.section.path} has embeddings for {size:,} tokens, and the "
                    f"tokenizer has {len(tokenizer):,}, so its distribution is not over all of "
                    "them; choose a model that has them all, or leave model.new_special_tokens out"
                )

    @property
    def saves_base(self) -> bool:
        """Whether a checkpoint contains what the policy's base becomes."""
        method = self.models.policy.options.method
        return method is not None and method.saves_base_model

    @cached_property
    def collation(self) -> Collation:
        """How examples become a batch everywhere in the run, with their pictures."""
        return collation_of(self.stage, self.codec, packing=self.data.packing)

    def restore(self, trainer: Trainer) -> None:
        """Give ``trainer`` the states of the checkpoint, if the run is resumed from one."""
        if self.start is not None:
            self.start.restore(trainer, self.base)
            check_code(self.record, self.start.folder)
        trainer.settle_best()

    def judged_on(self, data: AnyData) -> str:
        """The hash of what evaluations measure, and of what measures it beside the weights."""
        rows = {name: dataset.fingerprint for name, dataset in data.evals.items()}
        code = sorted(json.loads(self.record.get(CODE, b"{}")).values())  # wherever it lies
        return digest(json.dumps([rows, hash_of_settings(self.stage), code]).encode())

    def for_data(self, data: AnyData) -> RunParts:
        """These parts, whose networks are made for packed rows of ``data``: of its longest document
        with what the stage adds, and of its pictures. Of examples that are not encoded yet, as long
        as ``data.cutoff_len`` allows."""
        longest = self.data.longest
        if data.whole is not None:
            datasets = (data.whole, *data.evals.values())
            encoded = max(int(dataset.lengths.max(initial=0)) for dataset in datasets)
            longest = longest_row(self.stage, encoded, longest)
        probes = self.picture_probes() if data.has_pictures else ()
        return self.for_rows(longest + self.stage.max_new_tokens, probes)

    def for_rows(self, longest: int, probes: Sequence[Probe] = ()) -> RunParts:
        """These parts, whose networks are made for documents of up to ``longest`` tokens."""
        policy = self.models.policy
        options = replace(policy.options, longest=longest, probes=probes)
        return replace(self, models=replace(self.models, policy=replace(policy, options=options)))

    def picture_probes(self) -> Sequence[Probe]:
        """Documents with pictures, for the check of packed rows, if there are any."""
        if self.codec.media is None or not self.data.packing:
            return ()
        packed = replace(self.collation, collate=collate)  # conversations, in any stage
        padded, items = replace(packed, packing=False), self.codec.picture_probe()
        return [Probe(packed.batch(items).read(), [padded.batch([item]).read() for item in items])]


def collation_of(stage: Stage, codec: Codec | None = None, *, packing: bool) -> Collation:
    """How examples become a batch; with their pictures, if ``codec`` reads any."""
    media = None
    if codec is not None and codec.media is not None:
        media = replace(codec.media, make_spare=lambda: without_labels(codec.picture_probe()[0]))
    return Collation(stage.collate, packing, media=media)
