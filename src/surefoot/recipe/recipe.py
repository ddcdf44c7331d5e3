"""The recipe: one YAML file, one frozen tree of sections, and the rules between them.

A path in it is relative to the recipe file if it exists there, otherwise to the current folder;
only ``train.output_dir`` is always relative to the current folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from .. import schema
from ..checkpoint.section import CheckpointSection
from ..data.section import DataSection
from ..generate.section import GenerateSection
from ..methods import METHODS
from ..methods.full import Full
from ..model.section import ModelSection
from ..optim import OPTIMIZERS
from ..optim.adamw import AdamW
from ..parallel.section import ParallelSection
from ..schema import Problem, Variants
from ..stages import STAGES
from ..stages.dpo import DPO
from ..training.method import Method
from ..training.section import TrainSection
from ..training.stage import Stage
from .document import Document
from .files import read_text
from .overrides import Overrides, override
from .recipe_paths import locate, locate_model
from .yaml import emit, parse


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: ModelSection
    """The pretrained model."""
    data: DataSection
    """What to train on."""
    method: Annotated[Method, Variants(METHODS)] = Full()
    """Which parameters are trainable."""
    stage: Annotated[Stage, Variants(STAGES)]
    """The training objective."""
    train: TrainSection
    """How long to train, in what steps, with what logs."""
    optim: Annotated[AdamW, Variants(OPTIMIZERS)] = AdamW()
    """The optimizer and its learning rate."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When to save, what to keep, what to resume from."""
    parallel: ParallelSection = ParallelSection()
    """The mesh of ranks."""
    generate: GenerateSection = GenerateSection()
    """How responses are sampled."""


def load(path: Path, overrides: Overrides = ()) -> Recipe:
    """Read the recipe file ``path``, with ``overrides`` applied.

    Raises:
        RecipeError: with all validation errors, each with file, line and column.
    """
    document = parse(read_text(path), str(path))
    return _build(override(Recipe, document, overrides), path.parent)


def read(
    data: Recipe | Mapping[str, object], overrides: Overrides = (), base: Path = Path()
) -> Recipe:
    """Build a recipe from plain data, or from the dataclasses themselves.

    Args:
        data: sections by name; the content of a recipe file.
        overrides: settings with precedence over ``data``; see ``recipe.overrides``.
        base: the folder that paths are relative to.

    Raises:
        RecipeError: with all validation errors.
    """
    return _build(override(Recipe, Document(data), overrides), base)


def _build(document: Document, base: Path) -> Recipe:
    recipe = schema.read(Recipe, document.data, fail=document.error)
    problems = [problem for rule in RULES for problem in rule(recipe)]
    if problems:
        raise document.error(problems)
    return _with_places(recipe, base)


def _with_places(recipe: Recipe, base: Path) -> Recipe:
    """The recipe with absolute paths, so that it means the same wherever it is read again."""
    model, data, train, stage = recipe.model, recipe.data, recipe.train, recipe.stage
    if isinstance(stage, DPO) and stage.reference:
        stage = replace(stage, reference=locate_model(stage.reference, base))
    adapter = locate(model.adapter, base) if model.adapter else None
    run, caches = train.output_dir, (data.cache_dir, train.cache_dir)
    data_cache, run_cache = (path.expanduser().absolute() if path else None for path in caches)
    return replace(
        recipe,
        stage=stage,
        model=replace(model, path=locate_model(model.path, base), adapter=adapter),
        data=replace(data, dataset_dir=locate(data.dataset_dir, base), cache_dir=data_cache),
        train=replace(
            train,
            output_dir=run.expanduser() if isinstance(run, Path) else run,
            cache_dir=run_cache,
        ),
    )


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with all settings; ``load`` returns an equal recipe."""
    return emit(schema.write(recipe))


def changes(old: Recipe, new: Recipe) -> list[Change]:
    """The settings whose values differ, in the order of the recipe."""
    return list(_changes(old, new, ()))


@dataclass(frozen=True)
class Change:
    """A setting whose value has changed."""

    path: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def _changes(old: object, new: object, path: schema.Keys) -> Iterator[Change]:
    cls: type = type(old)
    for name, setting in schema.settings(cls).items():
        before, after, here = getattr(old, name), getattr(new, name), (*path, name)
        if setting.choices is not None:
            variants = [schema.variant_name(setting.choices, value) for value in (before, after)]
            if variants[0] != variants[1]:
                yield Change(schema.dotted(here), *variants)
                continue
            here = (*here, variants[0])
        if schema.is_section(before):
            yield from _changes(before, after, here)
        elif before != after:
            yield Change(schema.dotted(here), schema.write(before), schema.write(after))


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
    """The best checkpoint and early stopping need evaluations."""
    asked = ("load_best_model_at_end", "early_stopping_patience")
    if _evaluates(recipe) is None:
        for name in asked:
            if getattr(recipe.train, name):
                message = "needs evaluations; set train.eval_steps, eval_minutes or eval_epoch"
                yield Problem(("train", name), message)


def the_best_is_known_by_an_evaluation_metric(recipe: Recipe) -> Iterator[Problem]:
    """Metrics of evaluations are called ``eval_...``; other errors show at the first evaluation."""
    name = recipe.train.metric_for_best_model
    if _evaluates(recipe) and not name.startswith("eval_"):
        message = f"expected a metric of evaluations such as eval_loss, got {name!r}"
        yield Problem(("train", "metric_for_best_model"), message)


def an_adapter_needs_lora(recipe: Recipe) -> Iterator[Problem]:
    """Only an adapter method can continue from an adapter."""
    if recipe.model.adapter is not None and recipe.method.kind != "adapter":
        name = schema.variant_name(METHODS, recipe.method)
        yield Problem(
            ("model", "adapter"),
            f"method {name} does not train adapters; use method: lora, "
            "or merge it into the model first with `surefoot export`",
        )


def a_quantized_base_needs_lora(recipe: Recipe) -> Iterator[Problem]:
    """A base in 4 or 8 bits is frozen: the method must train something else."""
    model, kept = recipe.model, ModelSection(path="")
    if model.quantization_bit is not None and recipe.method.kind != "adapter":
        name = schema.variant_name(METHODS, recipe.method)
        message = (
            f"method {name} trains the weights themselves; use method: lora, or leave it unset"
        )
        yield Problem(("model", "quantization_bit"), message)
    if model.quantization_bit != 4:
        for name in ("quantization_type", "double_quantization"):
            if getattr(model, name) != getattr(kept, name):
                yield Problem(("model", name), "has no effect unless model.quantization_bit is 4")


def rolling_back_needs_checkpoints(recipe: Recipe) -> Iterator[Problem]:
    """``on_nan: rollback`` loads a checkpoint, so the run must save some."""
    saves = recipe.checkpoint
    saved = saves.save_steps or saves.save_minutes or saves.save_epoch
    if recipe.train.on_nan == "rollback" and not saved:
        yield Problem(("train", "on_nan"), "rollback needs checkpoints; set checkpoint.save_steps")


def plain_text_has_no_turns(recipe: Recipe) -> Iterator[Problem]:
    """A stage for plain text trains on all of it; settings for turns would have no effect."""
    if not recipe.stage.uses_template:
        stage = schema.variant_name(STAGES, recipe.stage)
        for name in ("train_on_prompt", "mask_history", "default_system"):
            if getattr(recipe.data, name):
                message = f"has no effect with stage {stage}, which trains on whole texts"
                yield Problem(("data", name), message)


def preferences_are_of_last_answers(recipe: Recipe) -> Iterator[Problem]:
    """Both responses of a pair are trained, and the prompt is masked; reference
    log-probabilities of all pairs are computed before the first step.
    """
    if not isinstance(recipe.stage, DPO):
        return
    for name in ("train_on_prompt", "mask_history"):
        if getattr(recipe.data, name):
            yield Problem(
                ("data", name), "has no effect with stage dpo, which trains on last responses"
            )
    if recipe.data.streaming and recipe.stage.compares:
        message = (
            "stage dpo computes reference log-probabilities of all pairs before the first "
            "step; switch streaming off, or use loss_type: orpo or simpo, which need none"
        )
        yield Problem(("data", "streaming"), message)


def trained_weights_need_range(recipe: Recipe) -> Iterator[Problem]:
    """In float16 the optimizer's epsilon is 0 and small updates vanish."""
    if recipe.model.dtype == "float16" and recipe.method.kind == "full":
        yield Problem(
            ("model", "dtype"),
            "trainable weights cannot be float16; use auto (and train.precision: fp16)",
        )


RULES: list[Rule] = [
    evaluating_needs_data,
    best_needs_evaluations,
    the_best_is_known_by_an_evaluation_metric,
    an_adapter_needs_lora,
    a_quantized_base_needs_lora,
    rolling_back_needs_checkpoints,
    plain_text_has_no_turns,
    preferences_are_of_last_answers,
    trained_weights_need_range,
]
