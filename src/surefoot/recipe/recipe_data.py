"""The data of a recipe: with its tokenizer and template, through its cache, in batches that the
ranks can share.

Training and evaluation both use this module, so they get the same tokens and hold out the same
rows.
"""

from __future__ import annotations

import inspect
import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..data.media.batch_media import BatchMedia, ModelInputs, check_inputs
from ..data.media.files import MediaFiles
from ..data.media.processor import open_processor
from ..data.order.micro_batches import check_divides, fitting_micro_batch
from ..data.rows.catalog import problems_of
from ..data.rows.rows import Reading
from ..data.section import DataSection
from ..data.store.cache import default_folder
from ..data.text.codec import Codec
from ..data.text.templates import (
    optional_template,
    section_template,
    template_mismatch,
    with_system,
)
from ..data.training_data import Encoding, EncodingReport, encode_stream, prepare
from ..errors import ModelError, RecipeError, RunError, TemplateError
from ..model import adapter_files
from ..model.config import (
    CONFIG,
    UnreadableConfigError,
    num_positions,
    positions_key,
    read_config,
    why_not_extended,
)
from ..model.loading import resolve
from ..model.section import ModelSection
from ..model.tokenizer import TOKENIZER_CONFIG, load_tokenizer
from ..network.draft import from_config
from ..parallel.launcher import num_processes
from ..parallel.section import ParallelSection, launched
from ..schema import Unset
from ..stages import STAGES
from ..storage.child import Child
from ..training.section import TrainSection
from ..training.stage import Stage
from .recipe import Recipe, dump

logger = logging.getLogger(__name__)
# Doge's: beyond it, each query sees only so many keys. If no row is padded, transformers chooses
# among the keys behind the query, too.
KEPT_KEYS = "keep_window_size"


def find_base(recipe: Recipe, *, weights: bool = True) -> Path:
    """The folder of the recipe's model; see ``resolve``. Raises ``ModelError`` if there is none, or
    no adapter where the recipe has one. The error says what is wrong with the data, too."""
    problems, folder = [], Path()
    try:
        folder = resolve(recipe.model, weights=weights)
    except ModelError as error:
        problems.append(str(error))
    adapters = [("frozen_adapters", path) for path in recipe.model.frozen_adapters]
    if recipe.model.adapter is not None:
        adapters.insert(0, ("adapter", recipe.model.adapter))
    for name, path in adapters:
        try:
            adapter_files.check(path, weights=weights)
        except ModelError as error:
            problems.append(f"model.{name}: {error}")
    if problems:
        raise ModelError("\n".join([*problems, *problems_of(recipe.data)]))
    return folder


def tokenizer_folder(model: ModelSection, base: Path) -> Path:
    """The folder with the tokenizer and the chat template that the model was trained with so far:
    of its adapter if it has a tokenizer, else ``base``."""
    adapter = model.adapter
    return base if adapter is None or not (adapter / TOKENIZER_CONFIG).is_file() else adapter


def open_tokenizer(model: ModelSection, base: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model in ``base``, or of its adapter, with the section's new tokens.
    Raises ``ModelError``: it is missing or damaged."""
    folder, is_trusted = tokenizer_folder(model, base), model.trust_remote_code
    tokenizer = load_tokenizer(
        folder, trust_remote_code=is_trusted, new_special_tokens=model.new_special_tokens
    )
    if folder != base and tokenizer.chat_template is None:  # then the base's is in use
        base_tokenizer = load_tokenizer(base, trust_remote_code=is_trusted)
        tokenizer.chat_template = base_tokenizer.chat_template
    return tokenizer


def open_codec(recipe: Recipe, base: Path) -> Codec:
    """The tokenizer of the model in ``base``, or of its adapter, with the recipe's new tokens and
    chat template.

    Raises:
        RecipeError: ``data.cutoff_len`` is more than the model has positions, or
            ``model.eos_token`` is no token.
        ModelError: the tokenizer is missing or damaged.
        TemplateError: the template is unknown, or needs tokens that the tokenizer does not have.
    """
    tokenizer = open_tokenizer(recipe.model, base)
    if (eos := recipe.model.eos_token) is not None and eos not in tokenizer.get_vocab():
        raise RecipeError(
            f"model.eos_token: {eos!r} is no token of {tokenizer.name_or_path}; name one of its "
            "tokens, or add it by model.new_special_tokens"
        )
    uses_template = recipe.stage.uses_template
    template_of = optional_template if recipe.stage.reads_texts else section_template
    try:
        template = template_of(recipe.data, tokenizer) if uses_template else None
    except TemplateError as error:
        more = problems_of(recipe.data)  # so that all are said at once
        raise TemplateError("\n".join([str(error), *more])) from error
    section = settled(recipe, base).data
    if not recipe.stage.reads_pictures:
        return Codec(tokenizer, template, section, None, why_text())
    parallel = recipe.parallel
    if parallel.sequence_parallel or parallel.cp > 1:
        name = "cp" if parallel.cp > 1 else "sequence_parallel"
        why = f"ranks of parallel.{name} cannot share them"
        return Codec(tokenizer, template, section, None, why)
    cache = recipe.data.cache_dir or default_folder()
    try:
        media = media_of(recipe.model, recipe.data, base, tokenizer, cache)
    except ModelError as error:  # rows of text need no processor
        return Codec(tokenizer, template, section, None, str(error))
    return Codec(tokenizer, template, section, media)


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """The same; from here on the tokenizer contains the template in use."""
    codec = open_codec(recipe, base)
    if recipe.stage.uses_template and codec.template_text:
        folder = tokenizer_folder(recipe.model, base)
        owner = "model" if folder == base else "adapter"
        if folder != base:
            logger.info("tokenizer and chat template: those beside model.adapter, %s", folder)
        if difference := template_mismatch(codec.template, codec.tokenizer, owner):
            logger.warning("%s", difference)
        source, system = codec.template.source, codec.section.default_system
        if system is not None:  # whoever opens the saved weights has no recipe to find it in
            source = with_system(source, system, codec.tokenizer)
        codec.tokenizer.chat_template = source
    return codec


def why_text() -> str:
    """Why a row with pictures stops a stage that reads text alone."""
    *most, last = [name for name, stage in STAGES.own.items() if stage.reads_pictures]
    return f"only stage: {', '.join(most)} and {last} read them"


def media_of(
    section: ModelSection,
    data: DataSection,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None = None,
) -> BatchMedia | None:
    """How the model in ``base`` reads pictures; None if it reads text alone. Those that rows
    contain themselves are kept in ``cache``, or else in memory. Raises ``ModelError``: its
    processor cannot be opened."""
    most = data.media.max_pixels
    processor = open_processor(
        base, tokenizer, trust_remote_code=section.trust_remote_code, max_pixels=most
    )
    if processor is None:
        return None
    with torch.device("meta"):  # its code is asked, and none of its values
        model = from_config(base, section)
    # Models of one family differ in what they take, such as grid sizes of pictures.
    names = frozenset(inspect.signature(model.forward).parameters)
    found = (getattr(part, "get_rope_index", None) for part in (model, *model.children()))
    rope_index = next((each for each in found if each is not None), None)
    inputs = ModelInputs(names, rope_index)
    try:
        check_inputs(processor, inputs)
    except ModelError as error:
        raise ModelError(f"{base}: {error}") from None
    folder = data.media.folder or data.dataset_dir
    # A picture that was made smaller before would have another size than the exported processor,
    # which rounds in one step, gives it: in three of four photographs.
    media = replace(data.media, max_pixels=None) if processor.is_limited else data.media
    files = MediaFiles(media, folder, None if cache is None else cache / "media")
    return BatchMedia(processor, files, inputs)


def settled(recipe: Recipe, base: Path) -> Recipe:
    """``recipe`` with the ``data.cutoff_len`` that it has for the model in ``base``. Raises
    ``RecipeError`` if that is more than the model has positions, ``ModelError`` if
    ``model.max_positions`` cannot be had."""
    try:
        config = read_config(base, recipe.model)
    except UnreadableConfigError:
        return recipe  # said when the model is loaded; what needs the tokenizer alone goes on
    return replace(recipe, data=fitted_data(recipe.data, config, base))


def fitted_data(data: DataSection, config: PretrainedConfig, folder: Path) -> DataSection:
    """``data`` with the ``cutoff_len`` that it has for the model with ``config``, which ``folder``
    contains. Raises as ``settled``."""
    limit, cutoff = num_positions(config), data.cutoff_len
    window = getattr(config, KEPT_KEYS, None)
    if cutoff is not None and window is not None and cutoff > window:
        raise RecipeError(
            f"data.cutoff_len: {cutoff:,} is more than {KEPT_KEYS} ({window:,}) in "
            f"{folder / CONFIG}; transformers computes longer rows otherwise with padding than "
            f"alone; set it to {window} or less"
        )
    if cutoff is not None and limit is not None and cutoff > limit:
        raise RecipeError(
            f"data.cutoff_len: {cutoff:,} is more than the {limit:,} positions of the model "
            f"({positions_key(config)} in {folder / CONFIG}); {_cure(config, cutoff, limit)}"
        )
    limits = (n for n in (data.longest, limit, window) if n is not None)
    return replace(data, cutoff_len=min(limits))


def _cure(config: PretrainedConfig, cutoff: int, limit: int) -> str:
    lower = f"set it to {limit} or less"
    if why_not_extended(config) is not None:
        return lower
    return f"{lower}, or set model.max_positions={cutoff}, which rescales rotary embeddings"


def encode_datasets(encoding: Encoding) -> EncodingReport:
    """Encode all datasets into the cache; what became of their rows. Raises ``DataError``:
    something is missing, broken, or gives nothing to learn."""
    if not encoding.section.streaming:
        return prepare(encoding).report
    latest = {report.name: report for report in encode_stream(encoding)}
    return EncodingReport(tuple(latest.values()))


def read_encoding(recipe: Recipe) -> Encoding:
    """What is encoded of ``recipe`` in a process that does nothing else."""
    return encoding_of(recipe, open_codec(recipe, resolve(recipe.model, weights=False)))


def encoding_of(recipe: Recipe, codec: Codec) -> Encoding:
    """What is encoded of the datasets of a recipe."""
    # of a stage no setting changes what is encoded
    stage = f"{type(recipe.stage).__name__}{recipe.stage.encoding}"
    fingerprint = {"codec": codec.fingerprint, "stage": stage}
    encode = partial(recipe.stage.encode, codec=codec)
    section = replace(recipe.data, cutoff_len=codec.section.cutoff_len)
    # A process reads what a recipe says: no stage with members from Python.
    start = partial(start_share, recipe) if type(recipe.stage) in STAGES.values() else None
    media = None if codec.media is None else codec.media.files
    reading = reading_of(recipe.stage, codec)
    return Encoding(section, encode, fingerprint, recipe.train.seed, section, start, media, reading)


def reading_of(stage: Stage, codec: Codec) -> Reading:
    """What a stage and its codec read of rows beside their format."""
    sees = codec.media is not None if stage.uses_template else None
    reading = Reading(codec.reads, stage.row_columns, stage.reads_pairs, sees)
    return reading if codec.media is None else replace(reading, resizes=codec.media.resizes)


def start_share(recipe: Recipe, name: str, number: int, count: int) -> Child:
    """Start the process that encodes share ``number`` of ``count`` of a dataset. Raises
    ``OSError``."""
    environment = {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    child = Child(
        ["-m", "surefoot.run._encoding_share"],
        log=Path(os.devnull),  # an error comes again, where its rows are left to
        talks=True,
        environment=environment,
        patience=0.0,
    )
    child.send({"recipe": dump(recipe), "dataset": name, "number": number, "count": count})
    return child


def with_batch_sizes(recipe: Recipe, num_data_ranks: int) -> tuple[Recipe, str | None]:
    """``recipe`` with batch sizes that divide among the ranks in place of those that it does not
    set, and what to log of the change. Sizes that it sets stay, divisible or not.

    A smaller micro-batch computes the same steps. The global batch is enlarged, and only if no
    smaller micro-batch makes it divide.
    """
    train = recipe.train
    size = _global_batch(train, num_data_ranks)
    micro = _micro_batch(train, size, num_data_ranks)
    chosen = {"global_batch_size": size, "micro_batch_size": micro}
    changed_sizes = [
        f"train.{name}: {value}" for name, value in chosen.items() if value != getattr(train, name)
    ]
    if not changed_sizes:
        return recipe, None
    changed = replace(train, global_batch_size=size, micro_batch_size=micro)
    return (
        replace(recipe, train=changed),
        f"{', '.join(changed_sizes)} (not set; chosen for {num_data_ranks} data-parallel ranks)",
    )


def _global_batch(train: TrainSection, num_ranks: int) -> int:
    """The examples of a step: as set, or the next multiple of what cannot be made smaller."""
    size, micro = train.global_batch_size, train.micro_batch_size
    if not isinstance(size, Unset):
        return size
    least = num_ranks if isinstance(micro, Unset | str) else num_ranks * micro
    return -(-size // least) * least


def _micro_batch(train: TrainSection, size: int, num_ranks: int) -> int | Literal["auto"]:
    """The examples of a micro-batch: as set, or the most that divide those of a rank."""
    micro = train.micro_batch_size
    if not isinstance(micro, Unset) or size % num_ranks:
        return micro
    return fitting_micro_batch(size // num_ranks, micro)


@dataclass(frozen=True)
class SingleRankRecipe:
    """A recipe for one rank, and the number of ranks for which it stands."""

    recipe: Recipe
    num_processes: int

    @classmethod
    def of(cls, recipe: Recipe) -> SingleRankRecipe:
        """The share of one rank of ``recipe``.

        Raises ``RecipeError`` if the ranks do not form the mesh, ``DataError`` if they do not
        divide the batch, ``RunError`` if a launcher has started several.
        """
        if (launch := launched()) is not None and launch[1] > 1:
            raise RunError(
                f"surefoot bench measures one rank, but {launch[1]} were started; start it without "
                "torchrun or srun"
            )
        count = 1 if launch is not None else num_processes(recipe.parallel)
        try:
            ranks = recipe.parallel.num_data_ranks(count)
        except ValueError as error:
            raise RecipeError(f"parallel: {error}") from None
        recipe, note = with_batch_sizes(recipe, ranks)
        if note is not None:
            logger.info("%s", note)
        train = recipe.train
        check_divides(train.global_batch_size, train.fixed_micro_batch_size, ranks)
        share = replace(train, global_batch_size=train.global_batch_size // ranks)
        return cls(replace(recipe, train=share, parallel=ParallelSection()), count)

    @property
    def model(self) -> ModelSection:
        """Its model."""
        return self.recipe.model

    @property
    def train(self) -> TrainSection:
        """Its training."""
        return self.recipe.train

    def short(self, steps: int, folder: Path) -> Recipe:
        """The same, over after ``steps`` and in another folder. What would be streamed is encoded
        before, as many rows as the shuffle looks at."""
        train = replace(self.train, output_dir=folder, max_steps=steps)
        train = replace(train, report_to=(), webhook=None)
        if train.on_nan == "rollback":  # there is nothing to go back to
            train = replace(train, on_nan="stop")
        data = self.recipe.data
        if data.streaming:
            rows = min(data.max_samples or data.buffer_size, data.buffer_size)
            data = replace(data, streaming=False, max_samples=rows)
        return replace(self.recipe, train=train, data=data)
