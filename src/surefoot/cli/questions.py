"""``surefoot eval --questions``: accuracy on questions with several choices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import RecipeError, counted
from .loading import loading, start_ranks
from .table import cell, console, progress, table

if TYPE_CHECKING:
    from ..inference.answer_journal import Output
    from ..inference.benchmarks.choice_prompts import PromptSettings
    from ..inference.benchmarks.multiple_choice import ChoiceReport
    from ..inference.benchmarks.questions import Benchmark
    from ..inference.model_loading import LoadedModel
    from ..parallel.world import World
    from ..recipe.prediction import Prediction


@dataclass(frozen=True)
class BenchmarkCommand:
    """The command line, without what it says of questions or tasks."""

    path: str
    overrides: Sequence[str]
    output: Path | None
    force: bool
    as_json: bool
    limit: int | None


def prediction_of(asked: BenchmarkCommand, options: Mapping[str, object]) -> Prediction:
    """The model to open. ``--model`` names another one than PATH; a checkpoint by its name is of
    the run at PATH. Raises ``RecipeError``: an option has no effect here."""
    from ..recipe.prediction import load

    if options.get("dataset") is not None:
        raise RecipeError("--dataset: has no effect on questions and tasks; remove it")
    path, model = asked.path, options.get("model")
    if model is not None:
        own = Path(path) / str(model)
        path = str(own if own.is_dir() else model)
    base = [] if options.get("base") is None else [f"model.base={options['base']}"]
    return load(path, [*asked.overrides, *base])


def answer(asked: BenchmarkCommand, options: Mapping[str, object]) -> None:
    """Answer the questions, write the results and show the accuracies."""
    from ..data.text.answers import check_output

    prediction = prediction_of(asked, options)
    benchmark = _benchmark(asked, options)
    path = asked.output or Path(f"{benchmark.name}.jsonl")
    check_output(path, force=asked.force)
    start_ranks(prediction.parallel)
    with loading():
        from ..inference.answer_journal import Output
        from ..inference.benchmarks.multiple_choice import answer_questions, write_results
        from ..parallel.generation_sharding import with_replicas
        from ..parallel.world import joined

    output = Output(path, asked.force)
    with joined(with_replicas(prediction.parallel)) as world:
        opened, size = open_sized(prediction, asked, world)
        settings = _settings(opened, options)
        shown = progress(benchmark.name, len(benchmark.questions), is_shown=world.is_main)
        with shown as advance:
            report = answer_questions(
                opened, benchmark, settings, output=output, batch_size=size, on_scored=advance
            )
        if world.is_main:
            write_results(report, output)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main:
            output.remove_parts()
    if world.is_main:
        _show(report, output, as_json=asked.as_json)


def _benchmark(asked: BenchmarkCommand, options: Mapping[str, object]) -> Benchmark:
    from ..inference.benchmarks.questions import read_benchmark

    examples = options["examples"]
    assert examples is None or isinstance(examples, Path)
    place, split = Path(str(options["questions"])), str(options["split"])
    found = read_benchmark(place, split=split, examples=examples)
    return (
        found if asked.limit is None else replace(found, questions=found.questions[: asked.limit])
    )


def open_sized(
    prediction: Prediction, asked: BenchmarkCommand, world: World
) -> tuple[LoadedModel, int]:
    """The model, and ``generate.batch_size`` of its run or of the command line."""
    from ..inference.model_loading import open_model
    from ..parallel.generation_sharding import with_replicas
    from ..recipe.prediction import load

    parallel = with_replicas(prediction.parallel)
    opened = open_model(**asdict(prediction.model), world=world, parallel=parallel)
    section = load(prediction.model.path, asked.overrides, generate=opened.generate).generate
    return opened, section.batch_size


def _settings(opened: LoadedModel, options: Mapping[str, object]) -> PromptSettings:
    """How the questions are written. Raises ``RecipeError``: chat needs a template."""
    from ..inference.benchmarks.choice_prompts import PromptSettings

    kind = options["prompts"] or ("text" if opened.template is None else "chat")
    if kind == "chat" and opened.template is None:
        raise RecipeError("--prompts chat: the model has no chat template; write text")
    return PromptSettings(
        shots=5 if options["shots"] is None else int(str(options["shots"])),
        language="zh" if options["lang"] == "zh" else "en",
        is_chat=kind == "chat",
        by_text=options["score"] == "text",
    )


def _show(report: ChoiceReport, output: Output, *, as_json: bool) -> None:
    found = report.as_data(output.path)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    groups = report.by_category or report.by_subject
    shown = table("category" if report.by_category else "subject", "questions", "accuracy")
    for name, group in groups.items():
        right = sum(one.is_right for one in group)
        shown.add_row(cell(name), f"{len(group):,}", f"{100 * right / len(group):.2f} %")
    screen = console()
    if len(groups) > 1:
        screen.print(shown)
    if count := report.num_short:
        click.echo(f"fewer examples before {counted(count, 'question')}: all did not fit")
    if count := report.num_too_long:
        click.echo(f"too long for the model, so wrong: {counted(count, 'question')}")
    for name, label in (("accuracy", "accuracy"), ("accuracy_by_byte", "accuracy by byte")):
        if (value := found.get(name)) is not None:
            click.echo(f"{label} {100 * float(str(value)):.2f} %")
    if unanswered := found["unanswered"]:
        click.echo(f"without a known answer: {counted(int(str(unanswered)), 'question')}")
    click.echo(f"results: {output.path}")
