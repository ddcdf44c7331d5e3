"""What a program gives to ``surefoot.train`` in place of names in a recipe."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from ..batch import Batch, Features, Loss, LossFunction, Outputs, OutputSpec
from ..checkpoint.disk.commit import new_folder, write_small
from ..checkpoint.disk.folder import TOKENIZER
from ..data.rows.formats.fields import Row, shown
from ..data.rows.registry import FORMS, LOOK, recognized
from ..data.section import DataSection
from ..errors import DataError, ModelError, RecipeError, RunError
from ..extensions import Extended
from ..methods import METHODS
from ..model.loading import resolve
from ..model.section import ModelSection
from ..model.weights import saved_files
from ..network.method import Method
from ..optim import OPTIMIZERS
from ..optim.optimizer import Optimizer
from ..recipe.recipe import Recipe
from ..schema import is_section
from ..schema.locations import DatasetReference
from ..stages import STAGES
from ..storage import files
from ..storage.files import digest
from ..storage.remote import Address
from ..training.callback import check_call
from ..training.section import TrainSection
from ..training.stage import POLICY, Stage

VARIANTS: Mapping[str, tuple[Extended[type[Any]], type]] = {
    "stage": (STAGES, Stage),
    "method": (METHODS, Method),
    "optim": (OPTIMIZERS, Optimizer),
}
TRAIN, EVAL = "train_dataset", "eval_dataset"  # names of the datasets in the recipe of the run
_NAME = re.compile(r"[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects; None: what the recipe names."""

    train_dataset: Rows | None = None
    eval_dataset: Rows | Mapping[str, Rows] | None = None
    model: nn.Module | PretrainedConfig | None = None
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, PreTrainedTokenizerBase | str | Path | None):
            own = getattr(self.tokenizer, "tokenizer", None)
            is_processor = isinstance(own, PreTrainedTokenizerBase)
            raise ModelError(
                "tokenizer: expected a tokenizer of transformers or its folder, got a "
                f"{type(self.tokenizer).__name__}"
                f"{'; give its .tokenizer, and the model has the rest' if is_processor else ''}"
            )

    def overrides(self, others: Mapping[str, object]) -> dict[str, object]:
        """The settings of a recipe with these objects, and ``others``; the classes of variants in
        these become known."""
        for name, (choices, protocol) in VARIANTS.items():
            register(name, others.get(name), choices, protocol)
        settings = dict[str, object]()
        if self.model is not None:
            settings["model.path"] = PLACEHOLDER
        if isinstance(self.model, PretrainedConfig):
            settings["model.new_weights"] = True
        if self.train_dataset is not None:
            settings["data.datasets"] = [TRAIN]
        if self.eval_dataset is not None:
            settings["data.eval_datasets"] = [*by_name(self.eval_dataset)]
        return settings | dict(others)

    def stored(self, recipe: Recipe) -> Recipe:
        """``recipe`` with the objects written into its folder. Raises ``SurefootError`` if they
        cannot be."""
        # Into the folder, so that a resume, an evaluation and an adapter find them without the
        # program; other objects are another run.
        datasets = {} if self.eval_dataset is None else by_name(self.eval_dataset)
        if taken := datasets.keys() & {TRAIN, *map(str, recipe.data.datasets)}:
            raise DataError(f"eval_dataset: {min(taken)} is a training dataset; give another name")
        if self.train_dataset is not None:
            datasets[TRAIN] = self.train_dataset
        if datasets:
            data = with_rows(recipe.data, datasets, recipe.train.folder)
            recipe = replace(recipe, data=data)
        if self.model is not None or self.tokenizer is not None:
            model = with_objects(recipe.model, recipe.train, self.model, self.tokenizer)
            recipe = replace(recipe, model=model)
        return recipe

    def fill(self, trained: nn.Module, recipe: Recipe) -> None:
        """Give a model object the weights that a copy of it was trained to, in ``recipe``'s run; if
        it has others by name, shape or place, say that it is not trained."""
        given = self.model
        if not isinstance(given, PreTrainedModel):
            return
        own, values = given.state_dict(), trained.state_dict()
        forms = [
            {name: (x.shape, isinstance(x, DTensor)) for name, x in each.items()}
            for each in (own, values)
        ]
        if forms[0] != forms[1]:
            logger.warning(
                "model: the given object is not trained, as the run's has other weights (an "
                "adapter, new tokens, shards); use the model that comes back, or open %s",
                recipe.train.folder,
            )
            return
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(values[name])
        files = saved_files(_tokenizer(given, self.tokenizer))
        _FILLED[_digest(files, given)] = Path(recipe.model.path)


# By the digest of an object with the weights of a run, what that run began from: a cell of a
# notebook that is executed again is the same run.
_FILLED: dict[str, Path] = {}

# Rows, as a ``datasets.Dataset`` has them, or columns, as a ``pandas.DataFrame`` does.
Rows: TypeAlias = "Iterable[Mapping[str, object]] | Mapping[str, Sequence[object]]"


def with_rows(section: DataSection, given: Mapping[str, Rows], folder: Path) -> DataSection:
    """``section``, whose datasets named in ``given`` are entries of these rows, written below
    ``folder``. Its other datasets stay. Raises ``DataError`` for rows that no file can contain, or
    of no known form."""
    target = write_rows(given, folder)

    def entry(reference: DatasetReference) -> DatasetReference:
        if (name := str(reference)) not in given:
            return reference
        return DatasetReference.of({"name": name, "file_name": str(target / f"{name}.jsonl")})

    return replace(
        section,
        datasets=tuple(map(entry, section.datasets)),
        eval_datasets=tuple(map(entry, section.eval_datasets)),
    )


def write_rows(given: Mapping[str, Rows], folder: Path) -> Path:
    """A folder below ``folder`` with a file of the rows of each name. Raises as ``with_rows``."""
    contents = {name: _text(name, rows) for name, rows in given.items()}
    digest = xxhash.xxh3_128()
    for name, text in contents.items():
        digest.update(f"{name}:{len(text)}:".encode() + text)
    target = (folder / f"datasets-{digest.hexdigest()[:12]}").absolute()
    with files.raising(RunError, f"train.output_dir: cannot write in {folder}"):
        files.make_folder(target)
        for name, text in contents.items():
            files.write_aside(target / f"{name}.jsonl", text)
    return target


def by_name(rows: Rows | Mapping[str, Rows]) -> dict[str, Rows]:
    """Datasets by their names: those of a mapping of datasets, or one. Raises ``DataError``."""
    if not isinstance(rows, Mapping) or not all(map(_is_dataset, rows.values())):
        return {EVAL: rows}  # type: ignore[dict-item]
    if not rows:
        raise DataError("eval_dataset: has no rows")
    for name in rows:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DataError(
                f"eval_dataset: {name!r} cannot be the name of a dataset; use letters, digits, _, "
                "- and ."
            )
    return dict(rows)


def _is_dataset(value: object) -> bool:
    """Whether it has rows, and is no column of values."""
    if _is_column(value):
        return len(value) > 0 and isinstance(value[0], Mapping)
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _text(name: str, rows: Rows) -> bytes:
    """The rows as lines of JSON."""
    lines = list[str]()
    for row in _iterated(name, rows, lines):
        where = f"{name}: row {len(lines)}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected a mapping of columns, got {shown(row)}")
        try:
            lines.append(json.dumps(dict(row), default=_number))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{where}: {error}; use text, numbers and lists") from None
    if not lines:
        raise DataError(f"{name}: has no rows")
    _check_form(name, [json.loads(line) for line in lines[:LOOK]])
    return ("\n".join(lines) + "\n").encode()


def _iterated(name: str, rows: Rows, lines: Sequence[str]) -> Iterator[object]:
    """The rows of an object, of which ``lines`` have come. Raises ``DataError``: it has none, or
    fails."""
    is_text = isinstance(rows, str | bytes | Path)
    if is_text or not (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
        hint = "; name a file in data.datasets" if is_text else ""
        raise DataError(f"{name}: expected rows, got {shown(rows)}{hint}")
    cure = "it is the given object that fails"
    with files.reading(DataError, lambda: f"{name}: row {len(lines)}", cure):
        yield from _plain(name, rows)


def _check_form(name: str, rows: Sequence[Row]) -> None:
    """Raise ``DataError`` if no format has the columns of ``rows``."""
    if recognized(rows) is None:
        columns = dict.fromkeys(column for row in rows for column in row)
        raise DataError(
            f"{name}: its columns are {', '.join(columns)}; expected one of these forms: "
            f"{'; '.join(FORMS)}. Rename the columns, or write a file and describe it by an entry "
            "in data.datasets"
        )


def _plain(name: str, rows: Rows) -> Rows:
    """The rows themselves, whatever form ``datasets`` would give them; of a DataFrame or of columns
    what stands side by side."""
    for package in ("pandas", "polars"):
        if (frames := sys.modules.get(package)) and isinstance(rows, frames.DataFrame):
            frame: Any = rows
            if package == "polars":
                return list[Row](frame.to_dicts())
            return list[Row](frame.astype(object).where(frame.notna(), None).to_dict("records"))
    if isinstance(rows, Mapping) and not isinstance(rows, _dataset_dicts()):
        return _of_columns(name, rows)
    datasets = sys.modules.get("datasets")  # nobody has one of its objects who has not imported it
    if datasets is None:
        return rows
    if isinstance(rows, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = ", ".join(rows)
        raise DataError(f"{name}: expected one split, got all of them; take one of: {splits}")
    return rows.with_format(None) if isinstance(rows, datasets.Dataset) else rows


def _dataset_dicts() -> tuple[type, ...]:
    datasets = sys.modules.get("datasets")
    return () if datasets is None else (datasets.DatasetDict, datasets.IterableDatasetDict)


def _of_columns(name: str, columns: Mapping[str, object]) -> list[dict[str, object]]:
    """The rows of columns. Raises ``DataError`` if they are no lists of equal length."""
    lists = {key: [*value] for key, value in columns.items() if _is_column(value)}
    if len(lists) < len(columns) or len({len(values) for values in lists.values()}) != 1:
        sizes = (f"{key}: {_size(value)}" for key, value in columns.items())
        raise DataError(
            f"{name}: expected rows, or for each column a list, all of equal length, got "
            f"{{{', '.join(sizes)}}}"
        )
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _is_column(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _size(value: object) -> str:
    return f"{len(value)} values" if _is_column(value) else shown(value)


def _number(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


logger = logging.getLogger(__name__)
PLACEHOLDER = "given as an object"  # the path of a model that has none yet


def with_objects(
    section: ModelSection,
    train: TrainSection,
    model: nn.Module | PretrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
) -> ModelSection:
    """``section`` for this model and tokenizer; one that is None is that of the recipe, or of the
    model's folder. Of a configuration, the run makes the model. Raises ``RecipeError`` or
    ``ModelError`` if they cannot be written."""
    if isinstance(train.output_dir, Address):
        raise RecipeError(
            "train.output_dir: a model or tokenizer object is written into the folder of the run, "
            f"and {train.output_dir} is a URL; save it and set model.path"
        )
    if model is not None and section.path != PLACEHOLDER:
        raise RecipeError("model.path: the model is given as an object, too; keep one of them")
    whole = _checked(model)
    files, folder = saved_files(_tokenizer(whole, tokenizer)), train.folder.absolute()
    if whole is None:
        base = resolve(section, weights=not section.new_weights)
        target = folder / f"base-model-{_digest(files, base)}"
        return _at(section, target if target.exists() else _linked(base, files, target))
    name = "configuration" if isinstance(whole, PretrainedConfig) else "base-model"
    digest = _digest(files, whole)
    target = folder / f"{name}-{digest}"
    if (first := _FILLED.get(digest)) is not None and first.parent == folder:
        target = first
    return _at(section, target if target.exists() else _saved(whole, files, target))


def _tokenizer(
    model: PreTrainedModel | PretrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
) -> PreTrainedTokenizerBase:
    """The tokenizer that is given, or that of the folder where ``model`` comes from."""
    if isinstance(tokenizer, str | Path):
        name = str(tokenizer)
        return _tokenizer_at(name, f"tokenizer: no tokenizer in {name!r}")
    if tokenizer is not None:
        return tokenizer
    name = getattr(model, "name_or_path", "")
    if not name:
        raise ModelError("model: an object without a folder has no tokenizer; give tokenizer=, too")
    return _tokenizer_at(name, f"model: no tokenizer in {name!r}, where it comes from; give one")


def _at(section: ModelSection, folder: Path) -> ModelSection:
    return replace(section, path=str(folder), revision=None)


def _checked(
    model: nn.Module | PretrainedConfig | None,
) -> PreTrainedModel | PretrainedConfig | None:
    if model is None or isinstance(model, PretrainedConfig):
        return model
    if not isinstance(model, PreTrainedModel):
        advice = (
            "give its base model, and its saved folder as model.adapter"
            if hasattr(model, "peft_config")
            else "expected a model or a configuration of transformers; of your own class, make a "
            "PreTrainedModel, save it, and set model.path and model.trust_remote_code"
        )
        raise ModelError(f"model: {type(model).__name__} cannot be trained: {advice}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError("model: it is quantized; give model.path and model.quantization_bit")
    if not all(parameter.requires_grad for parameter in model.parameters()):
        logger.warning(
            "model: requires_grad of the given object is not read: the method of the recipe says "
            "which weights are trained (method: freeze, say)"
        )
    return model


def _tokenizer_at(name: str, problem: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        raise ModelError(problem) from None
    return tokenizer


def _digest(files: Mapping[str, bytes], model: PreTrainedModel | PretrainedConfig | Path) -> str:
    """Equal for equal weights, configuration and tokenizer."""
    digest = xxhash.xxh3_128()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + data)
    if isinstance(model, Path):
        digest.update(str(model).encode())
        return digest.hexdigest()[:12]
    if isinstance(model, PretrainedConfig):
        digest.update(model.to_json_string().encode())
        return digest.hexdigest()[:12]
    digest.update(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _saved(
    model: PreTrainedModel | PretrainedConfig, tokenizer: Mapping[str, bytes], target: Path
) -> Path:
    disable_progress_bar()  # of transformers
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        write_small(folder, tokenizer)
    what = "a model" if isinstance(model, PretrainedConfig) else "a copy"
    logger.info("model: %s of the given object is trained, from %s", what, target)
    return target


def _linked(base: Path, tokenizer: Mapping[str, bytes], target: Path) -> Path:
    """Links to the files of a model, with another tokenizer."""
    with new_folder(target) as folder:
        write_small(folder, tokenizer)
        for path in sorted(base.iterdir()):
            is_tokenizer = any(fnmatch(path.name, pattern) for pattern in TOKENIZER)
            if not is_tokenizer and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path.absolute())
    return target


Collation = Callable[..., Batch]  # (features, *, packing), as ``Stage.collate``
MetricFunction = Callable[[Outputs, Batch], Mapping[str, torch.Tensor]]
GIVEN = tuple(f"{part} given from Python" for part in ("loss", "collation", "metric"))
MEASURED = ("logps", "predictions")  # what ``metrics`` reads, computed in evaluations


@dataclass(frozen=True)
class StageParts:
    """What replaces members of a recipe's stage; None: its own."""

    loss: LossFunction | None = None
    loss_outputs: Sequence[str] = ("logps",)  # fields of ``Outputs`` that ``loss`` reads
    collate: Collation | None = None
    metrics: MetricFunction | None = None  # sums over the weight of the loss

    def __post_init__(self) -> None:
        """Raises ``RecipeError``: one of them is no function, or of other arguments."""
        if self.loss is not None:
            check_call("parts: loss", self.loss, "outputs", "batch")
        if self.metrics is not None:
            check_call("parts: metrics", self.metrics, "outputs", "batch")
        if self.collate is not None:
            check_call("parts: collate", self.collate, "features", packing=False)

    def code(self) -> dict[str, str]:
        """The given functions, and hashes of their source."""
        functions = zip(GIVEN, (self.loss, self.collate, self.metrics), strict=True)
        return {role: _hash(function) for role, function in functions if function is not None}

    def of(self, stage: Stage) -> Stage:
        """``stage`` with these parts. Raises ``RecipeError`` for outputs that do not exist."""
        members: dict[str, object] = {}
        spec, eval_spec = stage.spec, stage.eval_spec
        if self.loss is not None:
            spec = eval_spec = _spec(self.loss_outputs)
            members["metrics"] = Stage.metrics  # no perplexity of another loss
        if self.metrics is not None:
            names = dict.fromkeys((*eval_spec.outputs, *MEASURED))
            eval_spec = replace(eval_spec, outputs=tuple(names))
        if self.loss is not None or self.metrics is not None:
            members |= {"spec": spec, "eval_spec": eval_spec, "loss": self._loss_of(stage)}
        if self.collate is not None:
            members["collate"] = staticmethod(_batching(self.collate))
        return _with_members(stage, members) if members else stage

    def _loss_of(self, stage: Stage) -> Callable[[object, str, Outputs, Batch], Loss]:
        loss, metrics = self.loss, self.metrics

        def compute(_self: object, role: str, outputs: Outputs, batch: Batch) -> Loss:
            is_own = loss is not None and role == POLICY
            result = loss(outputs, batch) if loss and is_own else stage.loss(role, outputs, batch)
            if not isinstance(result, Loss):
                kind = type(result).__name__
                raise RunError(f"loss: expected a surefoot.batch.Loss(total, weight), got {kind}")
            _check_tensors("loss", {"total": result.total, "weight": result.weight})
            if metrics is None or outputs.predictions is None:
                return result
            sums = metrics(outputs, batch)
            _check_tensors("metrics", sums)
            return replace(result, metrics={**result.metrics, **sums})

        return compute


def _check_tensors(part: str, values: object) -> None:
    """Raise ``RunError`` if ``values`` are no scalar tensors by name."""
    if not isinstance(values, Mapping):
        raise RunError(f"{part}: expected tensors by name, got a {type(values).__name__}")
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.dim():
            what = tuple(value.shape) if isinstance(value, torch.Tensor) else shown(value)
            raise RunError(f"{part}: {name}: expected a tensor of one number, a sum, got {what}")


def _batching(collate: Collation) -> Collation:
    """``collate``, of which a result that is no batch is an error."""

    def collated(features: Sequence[Features], *, packing: bool) -> Batch:
        batch = collate(features, packing=packing)
        if not isinstance(batch, Batch):
            raise RunError(
                f"collate: expected a surefoot.batch.Batch, got a {type(batch).__name__}; "
                "surefoot.data.text.collation.collate makes one"
            )
        return batch

    return collated


AS_IN_THE_RECIPE = StageParts()


def _with_members(stage: Stage, members: Mapping[str, object]) -> Stage:
    """An instance of a new class with the settings of ``stage``. It has the same name, by which
    encoded datasets are cached: no part changes these."""
    cls: Any = type(stage)
    subclass = type(cls.__name__, (cls,), dict(members))
    changed: Stage = subclass(**{f.name: getattr(stage, f.name) for f in fields(cls)})
    return changed


def _spec(outputs: Sequence[str]) -> OutputSpec:
    try:
        return OutputSpec((outputs,) if isinstance(outputs, str) else tuple(outputs))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"loss_{error}") from None


def _hash(function: Callable[..., object]) -> str:
    try:
        return digest(inspect.getsource(function).encode())
    except (OSError, TypeError):  # typed at a prompt, or built in
        return digest(repr(getattr(function, "__qualname__", type(function))).encode())


def register(name: str, value: object, choices: Extended[type[Any]], protocol: type) -> None:
    """Make the class of ``value``, an instance of a stage, say, known under its name, unless it is
    known. Raises ``RecipeError`` if that name is another class's, or if it lacks members of
    ``protocol``."""
    if not is_section(value) or type(value) in choices.values():
        return
    cls = type(value)
    if cls.__name__ in choices:
        raise RecipeError(f"{name}: there is another {cls.__name__}; give the class its own name")
    declared = (*vars(protocol), *inspect.get_annotations(protocol))
    members = [name for name in declared if not name.startswith("_")]
    missing = [name for name in members if not hasattr(value, name)]
    if missing:
        raise RecipeError(
            f"{name}: the class {cls.__name__} has no {', '.join(missing)}; add what "
            f"{protocol.__module__}.{protocol.__name__} declares"
        )
    choices.own[cls.__name__] = cls
