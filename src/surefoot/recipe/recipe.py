"""The recipe: one YAML file, one frozen tree of sections, and the rules between them.

A path in the file is relative to the file if it exists there, otherwise to the current folder. A
path in an override is relative to the current folder, and so is ``train.output_dir``.

The files and command lines of other programs become recipes here, too (``convert``).
"""

from __future__ import annotations

import logging
import os
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from .. import schema
from ..checkpoint.section import CheckpointSection
from ..data.section import DataSection
from ..errors import RecipeError
from ..extensions import Extended
from ..generate.section import GenerateSection
from ..methods import METHODS
from ..model.section import ModelSection, Recomputation
from ..network.method import Method
from ..optim import OPTIMIZERS
from ..optim.optimizer import Optimizer
from ..parallel.section import ParallelSection
from ..schema import (
    FREE,
    ROUNDS,
    Keys,
    Problem,
    UnsetText,
    Variants,
    is_section,
    settings,
    variant_name,
    write,
    write_setting,
)
from ..schema.locations import DatasetReference, FunctionPath, ModelPath, locate
from ..stages import STAGES
from ..storage.child import LAUNCHER
from ..storage.remote import MODELSCOPE, OPENMIND, is_address, is_switched_on
from ..training.section import TrainSection
from ..training.stage import Stage, is_greater_better, metrics_of
from .files import SUFFIXES, read_text, recipe_in
from .overrides import Overrides, idle_settings, override, put
from .yaml import Document, emit, parse

if TYPE_CHECKING:
    from ..training.callback import TrainerState


logger = logging.getLogger(__name__)
HINTS: Mapping[str, Callable[[], Mapping[str, str]]] = Extended("hints", {})
# Settings that this version no longer has, and the value at which it does the same without them:
# a run outlives the version that began it, and so does the recipe in its folder.
GONE: Mapping[tuple[str, str], object] = {
    ("train", "hub"): "huggingface",
    ("model", "shifted_attention_group"): None,
    ("parallel", "timeout_minutes"): 10.0,
}


@dataclass(frozen=True)
class MemorySettings:
    """What a recipe may leave to be chosen by the memory that is free when a run begins."""

    micro_batch_size: int
    gradient_checkpointing: Recomputation


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: ModelSection
    """The pretrained model."""
    data: DataSection
    """What to train on."""
    method: Annotated[Method, Variants(METHODS)] = METHODS["full"]()
    """Which parameters are trainable."""
    stage: Annotated[Stage, Variants(STAGES)]
    """The training objective."""
    train: TrainSection
    """How long to train, in what steps, with what logs."""
    optim: Annotated[Optimizer, Variants(OPTIMIZERS)] = OPTIMIZERS["adamw"]()
    """The optimizer and its learning rate."""
    checkpoint: Annotated[CheckpointSection, FREE] = CheckpointSection()
    """When to save, what to keep, what to resume from."""
    parallel: Annotated[ParallelSection, ROUNDS] = ParallelSection()
    """The mesh of ranks."""
    generate: Annotated[GenerateSection, FREE] = GenerateSection()
    """How responses are sampled."""

    @property
    def is_fitted(self) -> bool:
        """Whether nothing is left to be chosen by the memory that is free when a run begins."""
        return "auto" not in (self.train.micro_batch_size, self.model.gradient_checkpointing)

    @property
    def memory_settings(self) -> MemorySettings:
        """What they are. Raises ``RecipeError`` if something is left to be chosen."""
        return MemorySettings(self.train.fixed_micro_batch_size, self.model.recomputes)

    def filled_from(self, other: Recipe) -> Recipe:
        """The same with the values of ``other`` for what is left to be chosen so."""
        model, train = self.model, self.train
        if model.gradient_checkpointing == "auto":
            policy = other.model.gradient_checkpointing
            model = replace(model, gradient_checkpointing=policy)
        if train.micro_batch_size == "auto":
            train = replace(train, micro_batch_size=other.train.micro_batch_size)
        return replace(self, model=model, train=train)


# Files of other programs, which are converted. Plugins name the programs.


class RunExtras:
    """What a file asks of `surefoot train` and `eval` beside its recipe; by default nothing."""

    trains: bool = True
    """Whether it is trained at all; otherwise it is evaluated."""

    def check(self) -> None:
        """Raise what would fail after the run."""

    def callbacks(self, recipe: Recipe) -> Sequence[object]:
        """Callbacks of the run on the main rank."""
        return ()

    def finish(self, recipe: Recipe, state: TrainerState) -> None:
        """Called on the main rank when the last step is saved."""

    def after_run(self, recipe: Recipe) -> None:
        """Called at the end of the command."""

    def evaluate(self, recipe: Recipe, model: str | None) -> bool:
        """Evaluate ``model`` (None: the trained one); return whether the file requests that."""
        return False


@dataclass(frozen=True)
class ConvertedFile:
    """The file of another program as a recipe."""

    title: str  # the program, for people
    document: Document  # the recipe's sections, whose errors name the lines of the original
    notes: Sequence[str] = ()  # what differs, what its data sets need beside it, what is not used
    extras: RunExtras = RunExtras()
    is_complete: bool = True  # whether it names all that a run needs


class Importer(ABC):
    """A program whose files can be converted."""

    title: ClassVar[str]
    """The program, for people; empty for one whose files are refused."""

    @abstractmethod
    def recognise(self, data: Mapping[str, object]) -> bool:
        """Whether a file with this content is the program's."""

    @abstractmethod
    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """The recipe of ``document``; ``overrides`` win. Raises ``RecipeError``: a key cannot be
        had here, with line, reason and way out."""

    def convert_prediction(self, document: Document) -> Document | None:
        """The settings of a ``Prediction``, if ``document`` is for responses alone; else None.
        Raises ``RecipeError`` as ``convert`` does."""
        return None

    def prompts(self, document: Document) -> list[str]:
        """The prompts that ``document`` has itself: texts, or one file of them."""
        return []

    def read_words(self, words: Sequence[str]) -> tuple[Document, list[str]] | None:
        """The document and the overrides of a command line in the program's own words; None if it
        reads no such lines."""
        return None

    def convert_object(self, arguments: object) -> ConvertedFile | None:
        """The recipe of an object of the program's arguments, as a Python program makes it; None if
        it is none. Raises ``RecipeError`` as ``convert`` does."""
        return None


IMPORTERS: Mapping[str, Importer] = Extended("importers", {})


def importer_of(document: Document) -> Importer | None:
    """The importer that knows ``document``; None for a recipe, and if none does."""
    data = document.data
    # With these sections it is a recipe, even if one of its keys is
    # another program's: that key is named.
    if not isinstance(data, Mapping) or {"model", "data", "train"} <= data.keys():
        return None
    return next((each for each in IMPORTERS.values() if each.recognise(data)), None)


def load(path: Path, overrides: Overrides = (), *, is_saved: bool = False) -> Recipe:
    """Read the recipe file ``path``, or the recipe of the run or checkpoint in the folder ``path``,
    with ``overrides`` applied. Raises ``RecipeError``: with all validation errors, each with file,
    line and column. One that a run has saved may have settings that do nothing."""
    file, run = recipe_in(path)
    document = parse(read_text(file, follow=run is None), str(file))
    if (importer := importer_of(document)) is not None:
        return load_converted(importer.convert(document, overrides))
    if run is not None and not _is_remote(document):  # wherever it was moved to
        document = put(Recipe, document, ("train", "output_dir"), str(run), str(run))
    if run is None:  # whose recipe has all settings
        document = _with_hubs(document)
    stated = None if is_saved or run is not None else document
    overridden = override(Recipe, document, overrides)
    for line in _replaced(document, overridden) if LAUNCHER not in os.environ else ():
        logger.warning("%s", line)
    return _build(overridden, file.parent, stated)


def _replaced(before: Document, after: Document) -> Iterator[str]:
    """What to say of variants that overrides put in the place of the recipe's, and of the learning
    rate, which was chosen for the recipe's method."""
    for name in ("method", "stage", "optim"):
        (old, had), (new, _) = (_variant(document, name) for document in (before, after))
        rates = [path for path in after.overridden if path[-1] == "learning_rate"]
        is_rate_left = name == "method" and new != (old or "full") and not rates
        if old != new and (had or is_rate_left):
            more = (
                "; the learning rate stays the recipe's, so set that, too" if is_rate_left else ""
            )
            yield f"{name}: {new} in place of the recipe's {old or 'full'} and its settings{more}"


def _variant(document: Document, name: str) -> tuple[str, bool]:
    """The variant that ``document`` has at ``name``, and whether with settings; empty if none."""
    data = schema.expand(Recipe, document.data)
    value = data.get(name) if isinstance(data, Mapping) else None
    pairs = value.items() if isinstance(value, Mapping) else ()
    return next(((str(key), bool(inside)) for key, inside in pairs), ("", False))


def _with_hubs(document: Document) -> Document:
    """With the hub that people who come from LLaMA-Factory have chosen in their profile, for the
    sections that name none."""
    # The only setting from the environment: in a profile it is meant for every program. It is read
    # here alone, and the recipe of the run has its value.
    sections = document.data if isinstance(document.data, Mapping) else {}
    if is_switched_on(OPENMIND):
        logger.warning("%s is set, and that hub is not read; use a local folder", OPENMIND)
    if not is_switched_on(MODELSCOPE):
        return document
    unset = [
        name
        for name in ("model", "data")
        if isinstance(fields := sections.get(name), Mapping) and "hub" not in fields
    ]
    for name in unset:
        document = put(Recipe, document, (name, "hub"), "modelscope", MODELSCOPE)
    if unset and LAUNCHER not in os.environ:  # the launcher has said it
        names = ", ".join(f"{name}.hub" for name in unset)
        logger.info("%s: modelscope, unless set (%s)", names, MODELSCOPE)
    return document


def load_text(text: str, name: str, base: Path) -> Recipe:
    """The recipe ``text``; ``name`` precedes the line in messages, and paths are relative to
    ``base``. Raises ``RecipeError`` as ``load`` does."""
    document = parse(text, name)
    if (importer := importer_of(document)) is not None:
        load_converted(importer.convert(document, ()))  # its own errors come first
        raise document.error([Problem((), f"this is a file of {importer.title}, not a recipe")])
    return _build(document, base)


def load_converted(converted: ConvertedFile) -> Recipe:
    """The recipe of another program's file. Raises ``RecipeError``: with all validation errors,
    each with the key of the file that a setting is of, or as the file lacks what a run needs."""
    if not converted.is_complete:
        raise RecipeError(
            f"{converted.document.name}: this is a file of {converted.title}; `surefoot recipe "
            "convert` prints it as a recipe, to be completed"
        )
    recipe = _build(converted.document, Path.cwd())
    for problem in idle_settings(recipe, converted.document, converted.document):
        logger.warning("%s", converted.document.error([problem]))
    return recipe


def _is_remote(document: Document) -> bool:
    """Whether the run of a recipe is in an object store."""
    train = document.data.get("train") if isinstance(document.data, Mapping) else None
    folder = train.get("output_dir") if isinstance(train, Mapping) else None
    return isinstance(folder, str) and is_address(folder)


def read(
    data: Recipe | Mapping[str, object], overrides: Overrides = (), base: Path = Path()
) -> Recipe:
    """Build a recipe from plain data, or from the dataclasses themselves.

    Args:
        data: sections by name; the content of a recipe file.
        overrides: settings with precedence over ``data``; see ``recipe.overrides``.
        base: the folder that paths are relative to.

    Raises ``RecipeError``: with all validation errors.
    """
    stated = Document(data) if isinstance(data, Mapping) else None
    return _build(override(Recipe, Document(data), overrides), base, stated)


def read_object(arguments: object, overrides: Mapping[str, object]) -> Recipe:
    """The recipe of another program's object of arguments, ``TrainingArguments`` of transformers
    for one; what these lack is in ``overrides``. Raises ``RecipeError``."""
    candidates = (importer.convert_object(arguments) for importer in IMPORTERS.values())
    converted = next((each for each in candidates if each is not None), None)
    if converted is None:
        raise RecipeError(
            "recipe: expected a Recipe, the path of one, nested mappings, or TrainingArguments, "
            f"got a {type(arguments).__name__}"
        )
    for note in converted.notes:
        logger.info("%s", note)
    document = override(Recipe, converted.document, overrides)
    before, after = (_sections(each) for each in (converted.document, document))
    missing = [
        name
        for (section, key), name in _GIVEN.items()
        if key in before[section] and after[section].get(key) == before[section][key]
    ]
    if missing and not converted.is_complete:
        names = ", ".join(f"{name}=..." for name in missing)
        raise RecipeError(f"{converted.title}: name no model and no data; give {names}, too")
    return _build(document, Path.cwd())


# Settings that arguments of other programs lack, and what a program gives in their place.
_GIVEN = {
    ("model", "path"): "model",
    ("data", "datasets"): "train_dataset",
    ("data", "eval_datasets"): "eval_dataset",
}


def _sections(document: Document) -> Mapping[str, Any]:
    data: Any = document.data
    return {name: data.get(name, {}) for name in ("model", "data")}


def _names() -> Mapping[str, str]:
    """What to say of unknown keys: what plugins know of other programs' settings."""
    of_plugins = {name: hint for hints in HINTS.values() for name, hint in hints().items()}
    return {**of_plugins, "parallel.timeout_minutes": " (now parallel.timeout, in minutes too)"}


def _without_gone(document: Document) -> Document:
    data = document.data
    for (section, name), value in GONE.items():
        fields = data.get(section) if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and isinstance(fields, Mapping) and fields.get(name) == value:
            data = {**data, section: {key: fields[key] for key in fields if key != name}}
    return replace(document, data=data)


def _build(document: Document, base: Path, stated: Document | None = None) -> Recipe:
    """The recipe of ``document``, of which a user has ``stated`` some."""
    document = _without_gone(document)
    recipe = schema.read(Recipe, document.data, fail=document.error, names=_names)
    recipe = with_metric(recipe)
    problems = [problem for rule in RULES for problem in rule(recipe)]
    problems += idle_settings(recipe, document, stated)
    problems += recipe.method.problems(recipe.model)
    problems += recipe.stage.problems(recipe.data, recipe.parallel)
    if problems:
        raise document.error(problems)
    return _with_places(recipe, bases(document, base))


def _with_places(recipe: Recipe, base_of: BaseOf) -> Recipe:
    """The recipe with absolute paths, so that it means the same wherever it is read again."""
    placed = placing(base_of)

    def change(value: object, path: Keys) -> object:
        if path == ("train", "output_dir"):
            return value.expanduser() if isinstance(value, Path) else value
        if path[-1] == "cache_dir":
            return value.expanduser().absolute() if isinstance(value, Path) else value
        return placed(value, path)

    model = replace(recipe.model, path=ModelPath(recipe.model.path))
    return schema.mapped(replace(recipe, model=model), change)


def with_metric(recipe: Recipe) -> Recipe:
    """The recipe with the stage's metric of the best checkpoint, unless it names another one."""
    metric, named = UnsetText(f"eval_{recipe.stage.metric}"), recipe.train.metric_for_best_model
    if not isinstance(named, UnsetText) and named != metric:
        return recipe
    return replace(recipe, train=replace(recipe.train, metric_for_best_model=metric))


def greater_is_better(recipe: Recipe, metric: str | None = None) -> bool | None:
    """Whether greater values of ``metric``, by default that of the best checkpoint, are better, as
    the recipe or the stage that makes it says; None if neither does."""
    train, data = recipe.train, recipe.data
    metric = train.metric_for_best_model if metric is None else metric
    if metric == train.metric_for_best_model and train.greater_is_better is not None:
        return train.greater_is_better
    names = [*map(str, data.eval_datasets or data.datasets)]
    return is_greater_better(type(recipe.stage), metric, names)


def refuse_unknown_metric(recipe: Recipe) -> None:
    """Raise ``RecipeError`` if evaluations cannot be compared."""
    train = recipe.train
    is_evaluated = train.eval_steps or train.eval_minutes or train.eval_epoch
    if is_evaluated and greater_is_better(recipe) is None:
        names = [f"eval_{name}" for name in metrics_of(type(recipe.stage))]
        raise RecipeError(
            "train.metric_for_best_model: the stage has no metric "
            f"{str(train.metric_for_best_model)!r}; expected one of {', '.join(names)}; for one of "
            "your own, say by train.greater_is_better whether greater values are better"
        )


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with all settings; ``load`` returns an equal recipe."""
    return emit(schema.write(recipe))


# Rules between sections. What one can know of itself it checks in its own __post_init__.

Rule = Callable[[Recipe], Iterator[Problem]]


def _evaluates(recipe: Recipe) -> str | None:
    """The setting that requests evaluations, if there is one."""
    names = ("eval_steps", "eval_minutes", "eval_epoch")
    return next((name for name in names if getattr(recipe.train, name)), None)


def evaluating_needs_data(recipe: Recipe) -> Iterator[Problem]:
    """Evaluations need data."""
    name = _evaluates(recipe)
    if name and not recipe.data.eval_datasets and not recipe.data.val_size:
        message = "nothing to evaluate on; set data.val_size or data.eval_datasets"
        yield Problem(("train", name), message)


def best_needs_evaluations(recipe: Recipe) -> Iterator[Problem]:
    """The best checkpoint, early stopping and a schedule that follows a metric need evaluations."""
    if _evaluates(recipe) is None:
        optim = recipe.optim
        if optim.follows_evaluations:
            name = schema.variant_name(OPTIMIZERS, optim)
            message = (
                f"{optim.schedule} needs evaluations; set train.eval_steps, eval_minutes or "
                "eval_epoch, and data.val_size or data.eval_datasets"
            )
            yield Problem(("optim", name, "schedule"), message)
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(recipe.train, name):
                message = "needs evaluations; set train.eval_steps, eval_minutes or eval_epoch"
                yield Problem(("train", name), message)


def the_best_is_known_by_an_evaluation_metric(recipe: Recipe) -> Iterator[Problem]:
    """Metrics of evaluations are called ``eval_...``; other errors show at the first evaluation."""
    name = recipe.train.metric_for_best_model
    is_of_the_clock = name.endswith(("_runtime", "_per_second"))  # each rank has its own
    if _evaluates(recipe) and (is_of_the_clock or not name.startswith("eval_")):
        message = f"expected a metric of evaluations such as eval_loss, got {name!r}"
        yield Problem(("train", "metric_for_best_model"), message)


def rolling_back_needs_checkpoints(recipe: Recipe) -> Iterator[Problem]:
    """``on_nan: rollback`` loads a checkpoint, so the run must save some."""
    saves = recipe.checkpoint
    saved = saves.save_steps or saves.save_minutes or saves.save_epoch
    if recipe.train.on_nan == "rollback" and not saved:
        yield Problem(("train", "on_nan"), "rollback needs checkpoints; set checkpoint.save_steps")


def float8_needs_whole_matrices(recipe: Recipe) -> Iterator[Problem]:
    """Scales are those of whole rows; and fp16 would scale once more."""
    if recipe.model.float8 is None:
        return
    for name in ("tp", "pp"):
        if getattr(recipe.parallel, name) > 1:
            message = "model.float8 supports parallel.dp_shard and dp_replicate only; set it to 1"
            yield Problem(("parallel", name), message)
    if recipe.train.precision == "fp16":
        yield Problem(("train", "precision"), "model.float8 needs bf16 or fp32")


def noise_needs_whole_rows(recipe: Recipe) -> Iterator[Problem]:
    """Noise on embeddings is drawn for the complete rows, where they are embedded."""
    if recipe.model.neftune_noise_alpha is None:
        return
    for name, is_on in (
        ("pp", recipe.parallel.pp > 1),
        ("sequence_parallel", recipe.parallel.sequence_parallel),
    ):
        if is_on:
            message = "not supported with model.neftune_noise_alpha; remove one of the two"
            yield Problem(("parallel", name), message)


def parts_are_of_packed_rows(recipe: Recipe) -> Iterator[Problem]:
    """``parallel.cp`` divides the attention of packed rows, which is Surefoot's own; all else must
    see one token at a time, on one rank with all layers."""
    if recipe.parallel.cp == 1:
        return
    if not recipe.data.packing:
        message = "parallel.cp divides packed rows; set it to true, or leave parallel.cp at 1"
        yield Problem(("data", "packing"), message)
    if recipe.parallel.pp > 1:
        message = "the stages of a pipeline cannot share rows (parallel.cp); set one of them to 1"
        yield Problem(("parallel", "pp"), message)
    for name in ("neftune_noise_alpha", "router_bias_update_rate"):
        if getattr(recipe.model, name) is not None:
            message = "is of whole rows, which no rank has with parallel.cp; remove one of the two"
            yield Problem(("model", name), message)
    if recipe.model.attention == "flash_attention_2":
        message = "takes no part of a row (parallel.cp); use auto"
        yield Problem(("model", "attention"), message)


RULES: list[Rule] = [
    evaluating_needs_data,
    best_needs_evaluations,
    the_best_is_known_by_an_evaluation_metric,
    rolling_back_needs_checkpoints,
    float8_needs_whole_matrices,
    noise_needs_whole_rows,
    parts_are_of_packed_rows,
]


BaseOf = Callable[[Keys], Path]  # the folder that the path in a setting is relative to


def bases(document: Document, base: Path) -> BaseOf:
    """``base``, the folder of the recipe, for what the recipe says; the current folder for what an
    override says, so that a shell completes the path that is meant."""
    return lambda path: Path.cwd() if path in document.overridden else base


def placing(base_of: BaseOf) -> Callable[[object, Keys], object]:
    """What finds the value of a setting, if it is a location; for ``schema.mapped``."""

    def placed(value: object, path: Keys) -> object:
        if isinstance(value, ModelPath | FunctionPath | DatasetReference):
            return value.located(base_of(path))
        return locate(value, base_of(path)) if isinstance(value, Path) else value

    return placed


_WIDTH = 100  # columns of documentation


def lines(section: object, *, docs: bool = False, indent: str = "") -> Iterator[tuple[str, bool]]:
    """``section`` as lines of YAML that read back equal, each with whether it only says a default;
    ``docs`` adds the settings' documentation."""
    cls: type = type(section)
    for name, setting in settings(cls).items():
        value, inner = getattr(section, name), f"{indent}  "
        is_default = value == setting.default
        mark = "  # default" if is_default else ""
        for line in textwrap.wrap(setting.doc, _WIDTH - len(indent) - 2) if docs else ():
            yield f"{indent}# {line}", True
        if not is_section(value):
            for line in emit({name: write_setting(setting, value)}).splitlines():
                yield f"{indent}{line}{mark}", is_default
            continue
        variant = variant_name(setting.choices, value) if setting.choices else None
        if variant and not write(value):
            yield f"{indent}{name}: {variant}{mark}", is_default
            continue
        yield f"{indent}{name}:", is_default
        if variant:
            yield f"{inner}{variant}:", is_default
            inner = f"{inner}  "
        yield from lines(value, docs=docs, indent=inner)


def from_words(words: Sequence[str]) -> tuple[Importer, Document, list[str]] | None:
    """Whose ``--key value ...`` these are, the document, and the overrides among them."""
    lines = ((importer, importer.read_words(words)) for importer in IMPORTERS.values())
    return next(((importer, *read) for importer, read in lines if read), None)


def convert(words: Sequence[str], program: str | None = None) -> ConvertedFile | None:
    """The recipe of another program's ``FILE key=value ...`` or ``--key value ...``; None if the
    words are not another program's. ``program`` says whose file it is, if its content does not.
    Raises ``RecipeError``: it cannot be read or converted."""
    if words[0].startswith("--"):
        read = from_words(words)
        return None if read is None else read[0].convert(*read[1:])
    path = Path(words[0])
    if program is None and not (path.suffix in SUFFIXES and path.is_file()):
        return None
    document = parse(read_text(path), words[0])
    if program is not None and program not in IMPORTERS:
        program_names = ", ".join(name for name, importer in IMPORTERS.items() if importer.title)
        raise RecipeError(f"--from {program}: expected one of {program_names}")
    importer = IMPORTERS[program] if program is not None else importer_of(document)
    return None if importer is None else importer.convert(document, words[1:])


def unknown(path: Path) -> RecipeError:
    """The error for the file ``path``, which no program is known to have written."""
    document = parse(read_text(path), str(path))
    message = "this is a recipe already; `surefoot recipe show` prints all its settings"
    if not isinstance(document.data, Mapping) or not {"model", "data"} <= document.data.keys():
        titles = ", ".join(each.title for each in IMPORTERS.values() if each.title)
        message = f"this is a file of none of {titles}; --from NAME says whose it is"
    return document.error([Problem((), message)])
