"""Open a model for use: with the adapter, vocabulary and chat template of its training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batch import Classes
from ..checkpoint.layouts.detection import is_sequence_classification
from ..checkpoint.layouts.layout import AS_STORED, Reading
from ..data.example import JSON, Message
from ..data.media.batch_media import BatchMedia, PromptPictures
from ..data.media.files import Seen
from ..data.section import DataSection, without_datasets
from ..data.text.codec import Codec
from ..data.text.templates import Template, load_template, saved_source
from ..errors import DamagedFileError, ModelError
from ..generate.responses import PicturePrompt
from ..generate.section import GenerateSection, Ids
from ..log import fell_back
from ..model import base_identity
from ..model.config import extension_of
from ..model.loading import resolve
from ..model.section import ModelSection
from ..model.tokenizer import FILES as TOKENIZER_FILES
from ..model.tokenizer import load_tokenizer
from ..network.draft import NetworkOptions
from ..network.heads import head_size
from ..network.network import Network
from ..network.open import open_network
from ..parallel.section import ParallelSection
from ..parallel.world import ALONE, World
from ..recipe.prediction import PredictModel, classes_in
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import media_of
from ..recipe.run_recipe import NONE_DAMAGED, Damaged
from ..run.parts import RunParts
from ..storage.weight_files import is_adapter
from ._model_location import ModelLocation, locate

logger = logging.getLogger(__name__)
PLAINLY = ParallelSection()
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with everything needed to generate."""

    network: Network
    tokenizer: PreTrainedTokenizerBase
    template: Template | None  # None: it only continues plain text
    recipe: Recipe | RunParts | None = None  # of the run that made it
    folder: Path | None = None  # of the weights, of the adapter if it has one
    folders: tuple[Path, ...] = ()  # of all weights
    media: BatchMedia | None = None  # how it reads pictures; None: it reads text alone ...
    why_text: str = "this model reads text alone"  # ... for this reason

    @property
    def model(self) -> nn.Module:
        """The model with its adapter."""
        return self.network.module

    @property
    def world(self) -> World:
        """The processes that answer together."""
        return self.network.world

    @cached_property
    def codec(self) -> Codec:
        """Messages to ids as in training, with the recipe's default system message."""
        section = self.recipe.data if self.recipe else without_datasets()
        return Codec(self.tokenizer, self.template, section, self.media, self.why_text)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: the template's, the tokenizer's and the model's own."""
        return tuple(dict.fromkeys([*self.codec.stop_token_ids, *self.network.own_stops]))

    @property
    def gives_scores(self) -> bool:
        """Whether it scores texts and writes none; a head of values alone does not say so."""
        return gives_scores(self.recipe, self.folders)

    @cached_property
    def classes(self) -> Classes | None:
        """What the numbers of its head mean, if they are logits of classes."""
        return classes_of(self.recipe, self.folders)

    @property
    def generate(self) -> GenerateSection:
        """The generation settings of the run's recipe; greedy if there are none."""
        return self.recipe.generate if self.recipe else GenerateSection()

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[JSON] = (),
        template_arguments: JSON = MappingProxyType({}),
    ) -> Ids:
        """The ids of a conversation up to the beginning of the next response, with its pictures.
        Raises ``DataError``: one of these cannot be read."""
        codec = self.codec.with_arguments(template_arguments)
        return self.with_pictures(*codec.encode_with_pictures(messages, tools))

    def with_pictures(self, ids: Ids, pictures: Sequence[Seen]) -> Ids:
        """The ids of a prompt, with the pictures that they have placeholders of."""
        if not pictures or self.media is None:
            return ids
        return PicturePrompt.of(ids, PromptPictures(self.media, pictures))

    def reading_from(self, folder: Path | None) -> LoadedModel:
        """The same with pictures in ``folder``, if it is given, or where its recipe says."""
        if self.media is None or folder is None:
            return self
        files = replace(self.media.files, folder=folder, setting="--media-folder")
        return replace(self, media=replace(self.media, files=files))

    def within(self, most_pixels: int) -> LoadedModel:
        """The same that reads no picture of more pixels."""
        if self.media is None:
            return self
        files = replace(self.media.files, most_pixels=most_pixels)
        return replace(self, media=replace(self.media, files=files))

    def continuation(self, text: str) -> list[int]:
        """The ids of plain text to continue, after the tokenizer's prefix tokens."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        ends = ids and ids[-1] == self.tokenizer.eos_token_id
        return ids[:-1] if ends and not text.endswith(str(self.tokenizer.eos_token)) else ids

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return cast(torch.device, self.inner.device)

    @property
    def inner(self) -> PreTrainedModel:
        """The transformers model, without an adapter's wrapper."""
        return self.network.inner


def open_model(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    base: str | Path | None = None,
    weights: str | Path | None = None,
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
    world: World = ALONE,
    parallel: ParallelSection = PLAINLY,
) -> LoadedModel:
    """Open the model at ``path`` (see ``locate``), ready to generate.

    Args:
        path: a model, or an adapter, whose base is then loaded too.
        adapter: an adapter to put on the model of ``path``.
        base: the base of an adapter, if it is not where ``adapter_config.json`` says.
        weights: of the model, if ``path`` has only its configuration and tokenizer.
        dtype: of the weights; ``auto``: as stored on a GPU, float32 on a CPU.
        trust_remote_code: run code that comes with the model.
        world: the ranks over which to shard the model; a collective call.
        parallel: the mesh.

    Raises:
        ModelError: no such model, damaged files, an adapter of another model, or no base for it.
        CheckpointError: a damaged checkpoint, or a run that has none.
        RecipeError: the model cannot be sharded by ``parallel``.
    """
    section = ModelSection(path="", dtype=dtype, trust_remote_code=trust_remote_code)
    find = partial(find_parts, path, adapter=adapter, base=base, weights=weights)
    return _opened(section, world, parallel, {}, find)


def open_predicted(
    model: PredictModel, world: World = ALONE, parallel: ParallelSection = PLAINLY
) -> LoadedModel:
    """The same of the section of a prediction, which also says how weights of another program are
    read."""
    dtype, is_trusted = model.dtype, model.trust_remote_code
    section = ModelSection(path="", dtype=dtype, trust_remote_code=is_trusted)
    find = partial(
        find_parts,
        model.path,
        adapter=model.adapter,
        base=model.base,
        weights=model.weights,
        reading=model.reading,
    )
    return _opened(section, world, parallel, {}, find)


def open_to_measure(
    path: str | Path,
    model: ModelSection,
    heads: Mapping[str, int] = MappingProxyType({}),
    *,
    base: str | Path | None = None,
    world: World = ALONE,
    parallel: ParallelSection = PLAINLY,
) -> LoadedModel:
    """The same to be measured as the ``model`` of a recipe is: with the ``heads`` of its stage,
    which start at 0 if the model has none."""
    dtype, is_trusted = model.dtype, model.trust_remote_code
    section = ModelSection(path="", dtype=dtype, trust_remote_code=is_trusted)
    find = partial(find_parts, path, base=base, reading=model.reading)
    return _opened(section, world, parallel, heads, find)


def _opened(
    settings: ModelSection,
    world: World,
    parallel: ParallelSection,
    heads: Mapping[str, int],
    parts_of: Callable[..., ModelFolders],
) -> LoadedModel:
    """The model whose folders ``parts_of`` finds."""

    def find(damaged: Damaged) -> ModelFolders:
        with world.main_first():  # which downloads what is elsewhere
            return parts_of(damaged=damaged)

    def load(parts: ModelFolders) -> LoadedModel:
        section = replace(settings, path=str(parts.model), reading=parts.reading)
        tokenizer, template = _tokens_of(parts, trust_remote_code=section.trust_remote_code)
        network = _open(parts, section, tokenizer, world, parallel, heads)
        opened = LoadedModel(network, tokenizer, template, parts.recipe, parts.folder, parts.all)
        data = parts.recipe.data if parts.recipe else without_datasets()
        try:
            media = media_of(section, data, parts.model, tokenizer)
        except ModelError as error:  # text needs no processor
            return replace(opened, why_text=str(error))
        return replace(opened, media=media)

    return with_valid(find, load)


def open_start(parts: RunParts, world: World = ALONE) -> LoadedModel:
    """The initial model of a training, with its tokens and template; see ``RunParts.to_measure``.
    Else like ``open_model``."""
    policy, codec = parts.models.policy, parts.codec
    options = replace(policy.options, packing=False)  # which is switched on when it is measured
    network = open_network(policy.folder, policy.section, codec.tokenizer, world, options)
    network.module.eval()
    folders = ModelFolders(policy.folder, policy.section.adapter, policy.folder, None)
    template = codec.template if parts.stage.uses_template and codec.template_text else None
    opened = LoadedModel(network, codec.tokenizer, template, parts, folders.folder, folders.all)
    return replace(opened, media=codec.media, why_text=codec.why_text)


def _open(
    parts: ModelFolders,
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    parallel: ParallelSection,
    heads: Mapping[str, int],
) -> Network:
    """The model: in full, or only this rank's shards."""
    extended = {} if parts.adapter is None else extension_of(parts.adapter)
    # a checkpoint has the frozen adapters of its run
    frozen = section.frozen_adapters if parts.adapter == section.adapter else ()
    changes = {"adapter": parts.adapter, "frozen_adapters": frozen, **extended}
    plain = replace(section, compile=False, **changes)
    options = NetworkOptions(
        parallel=parallel,
        weights=parts.weights,
        heads=_heads(parts) or heads,
        is_trainable=False,
        only_generates=True,
    )
    network = open_network(parts.model, plain, tokenizer, world, options)
    network.module.eval()
    return network


def _heads(parts: ModelFolders) -> Mapping[str, int]:
    """The heads of a model that scores texts; none are needed to generate."""
    if not gives_scores(parts.recipe, (parts.model,)):
        return {}
    if parts.recipe is None:
        return {"values": head_size(parts.model, "values") or 1}
    return parts.recipe.stage.heads


def refuse_scorer(opened: LoadedModel) -> None:
    """Raise ``ModelError`` if a model was trained to score texts, not to write them."""
    if opened.gives_scores:
        what = "reward model scores responses" if opened.classes is None else "classifier labels"
        raise ModelError(
            f"{opened.folder}: a {what} and was not trained to write any; score those of a file "
            "with `surefoot predict`"
        )


@dataclass(frozen=True)
class ModelFolders:
    """The folders from which a model is opened."""

    model: Path
    adapter: Path | None
    tokenizer: Path  # the adapter's own if it has one: the template and tokens it was trained with
    recipe: Recipe | None
    weights: Path | None = None  # of the model, if they are elsewhere
    chosen: frozenset[Path] = frozenset()  # those that were chosen among the checkpoints of a run
    reading: Reading = field(default_factory=dict)  # of the weights

    @property
    def folder(self) -> Path:
        """The folder of the adapter or, without one, of the model."""
        return self.adapter or self.model

    @property
    def all(self) -> tuple[Path, ...]:
        """The folders of all weights."""
        folders = (self.model, self.adapter, self.weights)
        return tuple(folder for folder in folders if folder is not None)

    @property
    def gives_scores(self) -> bool:
        """Whether the model was trained to score texts; see ``LoadedModel.gives_scores``."""
        return gives_scores(self.recipe, self.all)

    @property
    def is_scorer_run(self) -> bool:
        """Whether Surefoot trained it to score texts."""
        return self.recipe is not None and self.recipe.stage.spec.gives_scores

    @property
    def classes(self) -> Classes | None:
        """What the numbers of its head mean, if they are logits of classes."""
        return classes_of(self.recipe, self.all)

    @property
    def global_batch_size(self) -> int | None:
        """That of the run; None without one."""
        return None if self.recipe is None else self.recipe.train.global_batch_size

    @property
    def base(self) -> ModelSection | None:
        """What the run began from; None without one."""
        return None if self.recipe is None else self.recipe.model

    @property
    def data(self) -> DataSection:
        """The data of the run; without one, no rows."""
        return without_datasets() if self.recipe is None else self.recipe.data


def codec_of(parts: ModelFolders) -> Codec:
    """The encoding that the tokenizer and the recipe of ``parts`` define; no model is opened."""
    return Codec(*_tokens_of(parts), parts.data)


def _tokens_of(
    parts: ModelFolders, *, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, Template | None]:
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=trust_remote_code)
    return tokenizer, load_template("auto", tokenizer) if saved_source(tokenizer) else None


def gives_scores(recipe: Recipe | RunParts | None, folders: Sequence[Path]) -> bool:
    """Whether a model in ``folders``, by the ``recipe`` of its run, scores texts."""
    if recipe is not None:
        return recipe.stage.spec.gives_scores
    return any(is_sequence_classification(folder) for folder in folders)


def classes_of(recipe: Recipe | RunParts | None, folders: Sequence[Path]) -> Classes | None:
    """The classes that it tells apart; None of any other model."""
    if recipe is not None:
        return recipe.stage.classes
    return next((each for each in map(classes_in, folders) if each is not None), None)


T = TypeVar("T")


def with_valid(find: Callable[[Damaged], ModelFolders], use: Callable[[ModelFolders], T]) -> T:
    """The result of ``use`` for what ``find`` finds. A checkpoint of a run that proves damaged
    while it is read is logged and skipped, and an earlier one is found; a checkpoint that the user
    named is an error. All ranks of a world get the same error."""
    damaged: dict[Path, str] = {}
    while True:
        parts = find(damaged)
        if parts.adapter is not None and parts.recipe is not None:
            _say_unquantized(parts.adapter, parts.recipe.model.quantization_bit)
        try:
            return use(parts)
        except DamagedFileError as error:
            if error.folder not in parts.chosen:
                raise
            logger.warning("%s is skipped: %s", error.folder.name, error)
            damaged[error.folder] = str(error)


@cache  # once for an export and its verification
def _say_unquantized(adapter: Path, bits: int | None) -> None:
    if bits is not None:
        fell_back(
            f"{adapter}: its base is used as it is stored",
            f"only training quantizes it (model.quantization_bit: {bits})",
            "gives other losses than training, by 0.1 in a trial with 4 bits; `surefoot eval` "
            "measures what is exported",
            logging.INFO,
        )


def find_parts(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    base: str | Path | None = None,
    weights: str | Path | None = None,
    damaged: Damaged = NONE_DAMAGED,
    reading: Reading = AS_STORED,
) -> ModelFolders:
    """The folders of the model, its adapter and its tokenizer; see ``open_model``, and ``locate``
    for ``damaged``."""
    if weights is None:
        located = locate(path, damaged, reading=reading)
        return _parts(located, adapter, base, damaged, reading)
    model = resolve(ModelSection(path=str(path)), weights=False)
    values = locate(weights, damaged, model=model, reading=reading)
    if values.is_adapter:
        raise ModelError(f"{values}: is an adapter, not the weights of a full model")
    parts = _parts(ModelLocation(model, is_adapter=False), adapter, base, damaged, reading)
    chosen = parts.chosen | _chosen(values)
    return replace(parts, weights=values.folder, chosen=chosen)


def _parts(
    located: ModelLocation,
    adapter: str | Path | None,
    base: str | Path | None,
    damaged: Damaged,
    reading: Reading,
) -> ModelFolders:
    if adapter is not None:
        if located.is_adapter:
            raise ModelError(f"{located}: is an adapter already; --adapter needs a full model")
        top = locate(adapter, damaged)
        if not top.is_adapter:
            raise ModelError(
                f"{top}: contains no {top.adapter_config.name}; expected the folder of an adapter"
            )
        return _on_base(top, located, reading)
    if located.is_adapter:
        return _on_base(located, _base_of(located, base, damaged, reading), reading)
    if base is not None:
        raise ModelError(f"{located}: is a full model, not an adapter, so it has no --base")
    folder = located.folder
    chosen = _chosen(located)
    return ModelFolders(folder, None, folder, located.recipe, None, chosen, reading)


def _chosen(*located: ModelLocation) -> frozenset[Path]:
    return frozenset(location.folder for location in located if location.is_chosen)


def _on_base(adapter: ModelLocation, base: ModelLocation, reading: Reading) -> ModelFolders:
    if not reading and adapter.recipe is not None:  # its base is read as its run has read it
        reading = adapter.recipe.model.reading
    has_tokenizer = any((adapter.folder / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = adapter.folder if has_tokenizer else base.folder
    chosen = _chosen(adapter, base)
    folder, recipe = adapter.folder, adapter.recipe
    return ModelFolders(base.folder, folder, tokenizer, recipe, None, chosen, reading)


def _base_of(
    adapter: ModelLocation, base: str | Path | None, damaged: Damaged, reading: Reading
) -> ModelLocation:
    """The base of an adapter: ``base``, or the one in its files, if these are still what the
    adapter was trained on."""
    if base is not None:
        located = locate(base, damaged, reading=reading)
        if located.is_adapter:
            raise ModelError(f"--base {base}: is an adapter; merge it first with `surefoot export`")
        return located
    named_base = _named_base(adapter)
    if names := base_identity.changes_below(adapter.folder, named_base.folder):
        raise ModelError(
            f"{adapter}: its base model {named_base} has changed since the adapter was trained "
            f"({base_identity.some(names)}); restore it, or use it nevertheless with "
            f"--base {named_base}"
        )
    return named_base


def _named_base(adapter: ModelLocation) -> ModelLocation:
    config = adapter.adapter_settings()
    name = config.get("base_model_name_or_path")
    if isinstance(name, str) and Path(name).is_dir():
        if is_adapter(Path(name)):
            raise ModelError(
                f"{adapter}: its base {name} is an adapter, too; merge that first with `surefoot "
                "export`, and name the result with --base"
            )
        return ModelLocation(Path(name), is_adapter=False)
    sections = [adapter.recipe.model] if adapter.recipe else []
    if isinstance(name, str) and name and not Path(name).is_absolute():
        sections.append(ModelSection(path=name, revision=config.get("revision")))
        if sections[0].path == name:  # a commit, where the recipe may have a branch
            sections[0] = replace(sections[0], revision=config.get("revision"))
    for section in sections:
        try:
            return ModelLocation(resolve(section), is_adapter=False)
        except ModelError:
            continue
    raise ModelError(
        f"{adapter}: the base model of this adapter, {name!r}, does not exist; name it with "
        "--base FOLDER"
    )
