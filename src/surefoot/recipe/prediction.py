"""The settings of a prediction: a recipe without training, from a file or the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from .. import schema
from ..batch import Classes
from ..checkpoint.disk import strict_json
from ..checkpoint.layouts.detection import is_sequence_classification
from ..checkpoint.layouts.reading import check_reading
from ..errors import RecipeError
from ..generate.section import GenerateSection
from ..parallel.section import ParallelSection
from ..schema import Problem
from ..schema.locations import ModelPath
from ..storage import files
from .files import RUN_RECIPE, SUFFIXES, read_text
from .overrides import Overrides, idle_settings, override
from .recipe import Recipe, bases, from_words, importer_of, placing
from .recipe import load as load_recipe
from .yaml import Document, parse

_OF_TRAINING = ("data", "stage", "train")  # sections that a recipe with training must have


@dataclass(frozen=True, kw_only=True)
class PredictModel:
    """Which model generates: the arguments of ``open_model``."""

    path: ModelPath
    """A run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model folder,
    a hub id, or a recipe."""
    weights: ModelPath | None = None
    """The folder of the weights, of any layout, if ``path`` contains only configuration and
    tokenizer."""
    reading: Mapping[str, ModelPath] = field(default_factory=dict, hash=False)
    """How weights of another program are read: its options of ``surefoot ckpt convert``, such as
    ``source_parallel_config``."""
    adapter: ModelPath | None = None
    """An adapter to put on the model of ``path``."""
    base: ModelPath | None = None
    """The base model of an adapter, if it moved."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. ``auto``: as stored on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A model, its generation settings, and its mesh of ranks."""

    model: PredictModel
    """Which model generates."""
    generate: GenerateSection = GenerateSection()
    """How responses are sampled."""
    parallel: ParallelSection = ParallelSection()
    """The mesh of ranks. The ranks that ``tp`` and ``dp_shard`` leave hold replicas of the
    model, among which the prompts are divided."""


def load(
    path: str, overrides: Overrides = (), *, generate: GenerateSection | None = None
) -> Prediction:
    """The settings of ``path``, with ``overrides`` applied.

    Args:
        path: a YAML file with the sections of a ``Prediction``, another program's for responses,
            or any ``PredictModel.path``; or the first word of another program's command line, of
            which ``overrides`` are the others.
        overrides: see ``recipe.overrides``.
        generate: the settings of the run that trained the model, which are the defaults.

    Raises ``RecipeError``: with all validation errors; ``CheckpointError`` for ``model.reading``.
    """
    stated, overrides, _ = read_program(path, overrides)
    document = override(Prediction, _document(stated, path, generate), overrides)
    prediction = schema.read(Prediction, document.data, fail=document.error)
    problems = [*_problems(prediction), *idle_settings(prediction, document, stated)]
    if problems:
        raise document.error(problems)
    base_of = bases(document, Path(path).parent if _is_file(path) else Path())
    prediction = schema.mapped(prediction, placing(base_of))
    model = prediction.model
    check_reading((model.weights or model.path, model.base), model.reading)
    return prediction


def gives_scores(path: Path) -> bool:
    """Whether the model at ``path`` scores texts: the run, a checkpoint or the recipe of a stage
    that trains one, or a folder of transformers' sequence classification. Raises ``RecipeError`` as
    ``recipe.load`` does."""
    if is_sequence_classification(path):
        return True
    recipe = recipe_of(path)
    return recipe is not None and recipe.stage.spec.gives_scores


def classes_in(folder: Path) -> Classes | None:
    """The classes of a classifier in a ``folder`` of transformers; None of a reward model, which
    has one, or of any other model."""
    if not is_sequence_classification(folder):
        return None
    config = strict_json.read_object(folder / "config.json")
    by_id = config.get("id2label")
    if not isinstance(by_id, dict) or len(by_id) < 2:
        return None
    names = [str(by_id.get(str(i))) for i in range(len(by_id))]
    is_multi_label = config.get("problem_type") == "multi_label_classification"
    return Classes(tuple(names), is_multi_label)


def recipe_of(*paths: str | Path | None) -> Recipe | None:
    """The recipe of the first of ``paths`` that is a run, a checkpoint or a recipe; None of others.
    Raises ``RecipeError`` as ``recipe.load`` does."""
    for path in (Path(path).expanduser() for path in paths if path):
        is_run = files.is_folder(path) and (path / RUN_RECIPE).is_file()
        if is_run or (path.suffix in SUFFIXES and path.is_file()):
            return load_recipe(path)
    return None


def parallel_of(overrides: Sequence[str]) -> tuple[ParallelSection, list[str]]:
    """The mesh of ranks for generation, whatever the model was trained on, as some of the
    ``overrides`` of its recipe set it; and the other overrides. Raises ``RecipeError`` as
    ``load`` does."""
    of_mesh: list[str] = []
    others: list[str] = []
    for setting in overrides:
        section = setting.partition("=")[0].partition(".")[0]
        (of_mesh if section == "parallel" else others).append(setting)
    return load("", of_mesh).parallel, others


def _is_file(path: str) -> bool:
    return Path(path).suffix in SUFFIXES and Path(path).is_file()


def read_program(path: str, overrides: Overrides) -> tuple[Document, Overrides, list[str]]:
    """What the file ``path``, or a command line of another program, says of responses, the
    overrides, and the prompts in it: texts, or a file. Raises ``RecipeError``."""
    if path.startswith("--"):
        read = from_words((path, *overrides))
        document = None if read is None else read[0].convert_prediction(read[1])
        if read is None or document is None:
            raise RecipeError(
                f"{path}: is no option of `surefoot predict`, nor are these words for responses of "
                "another program"
            )
        return document, read[2], read[0].prompts(read[1])
    document = parse(read_text(Path(path)), path) if _is_file(path) else Document({})
    importer = importer_of(document)
    converted = None if importer is None else importer.convert_prediction(document)
    if importer is None or converted is None:
        return document, overrides, []
    return converted, overrides, importer.prompts(document)


def _document(document: Document, path: str, generate: GenerateSection | None) -> Document:
    data = document.data
    is_ours = isinstance(data, Mapping) and not any(name in data for name in _OF_TRAINING)
    is_file = _is_file(path) or path.startswith("--")
    if not is_file or (isinstance(data, Mapping) and not is_ours):
        by_hand = frozenset({("model", "path")})  # on the command line, not by a file
        document = Document({"model": {"path": path}}, overridden=by_hand)
    if generate is not None and isinstance(document.data, Mapping):
        generate_settings = document.data.get("generate") or {}
        if isinstance(generate_settings, Mapping):
            data = {**document.data, "generate": {**schema.write(generate), **generate_settings}}
            document = replace(document, data=data)
    return document


def _problems(prediction: Prediction) -> Iterator[Problem]:
    parallel = prediction.parallel
    if parallel.pp > 1:
        message = "responses are generated token by token, and a pipeline would idle; use tp"
        yield Problem(("parallel", "pp"), message)
    if parallel.sequence_parallel:
        message = "has no effect on responses, which are generated token by token; remove it"
        yield Problem(("parallel", "sequence_parallel"), message)
    if parallel.cp > 1:
        message = "has no effect on responses, which are generated token by token; remove it"
        yield Problem(("parallel", "cp"), message)
    if prediction.model.weights is not None and prediction.model.base is not None:
        message = "cannot be used with model.weights: path is the base"
        yield Problem(("model", "base"), message)
