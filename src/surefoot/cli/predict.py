"""``surefoot predict``: responses to a file of prompts, on one process or many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RecipeError, counted
from .loading import loading, start_ranks, thinking_option
from .table import progress
from .targets import ReadingCommand

if TYPE_CHECKING:
    from ..data.section import DataSection
    from ..data.text.prompts import Prompt
    from ..generate.generation import FinishReason
    from ..recipe.prediction import Prediction
    from ..use import Answer

TRUNCATED: dict[FinishReason, str] = {  # why a response is incomplete
    "length": "truncated at generate.max_new_tokens",
    "context": "truncated at the model's context length",
}


@click.command(cls=ReadingCommand)
@click.argument("path")
@click.argument("overrides", nargs=-1)
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path),
    help="One prompt per line; or rows (JSON, JSON Lines, CSV, Parquet) such as a dataset's.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file of responses, one JSON object per line.",
)
@click.option("--system", help="A system message for prompts without one.")
@thinking_option
@click.option(
    "--media-folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder of the pictures of prompts. Unset: data.media.folder of the model's run, or "
    "the folder of PROMPTS.",
)
@click.option("--seed", type=int, default=42, show_default=True, help="Seed of sampling.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
def predict(
    path: str,
    overrides: tuple[str, ...],
    *,
    prompts: Path,
    output: Path,
    system: str | None,
    force: bool,
    **options: Any,
) -> None:
    """Generate a response to each prompt of a file.

    PATH is what `surefoot chat` accepts, or a YAML file with the sections model, generate and
    parallel. OVERRIDES are dotted fields of these, such as generate.max_new_tokens=64 or
    model.dtype=bfloat16. Sampling follows the run's recipe, and is greedy if there is none.

    A model that is too large for one device is sharded over several: parallel.tp=4. The remaining
    ranks hold replicas of the model; the prompts are divided among them. Like `surefoot train`,
    this command starts the ranks itself, one for each GPU, or uses those of torchrun or SLURM.
    Responses do not depend on their number.

    OUTPUT appears when all of it is written. Until then answers are stored in OUTPUT.part, and the
    same command continues after them. Each line has the fields of the prompt's line, then
    answer and finish_reason: stop, or where it was truncated, length (generate.max_new_tokens) or
    context (the context length). A prompt's row may have tools, function schemas; the calls in its
    answer are then in tool_calls.

    A reward model (stage rm) scores responses instead: PROMPTS are rows of a dataset, conversations
    that end in a response or pairs, and each line of OUTPUT has the fields of its row, then reward,
    or reward_chosen and reward_rejected.
    """
    from ..data.text.prompts import check_output, read_prompts
    from ..recipe.prediction import is_reward_model, load, recipe_of

    prediction = load(path, overrides)  # what is wrong is said before the slow imports
    check_output(output, force=force)
    recipe = recipe_of(prediction.model.adapter, prediction.model.path)
    section = recipe.data if recipe else None
    options["media_folder"] = (
        options["media_folder"] or (section and section.media.folder) or prompts.parent
    )
    if not is_reward_model(Path(prediction.model.path)):
        prompt_rows = [prompt.with_system(system) for prompt in read_prompts(prompts, section)]
        options["thinks"] = options.pop("thinking")
        _answer(prediction, path, overrides, prompt_rows, (output, force), options)
        return
    if options["thinking"] is not None:
        raise RecipeError("--thinking: has no effect on rewards")
    if system is not None:
        raise RecipeError("--system: has no effect on rewards; put it into the rows")
    _score(prediction, path, overrides, (prompts, section), (output, options["media_folder"]))


def _answer(
    prediction: Prediction,
    path: str,
    overrides: Sequence[str],
    prompts: Sequence[Prompt],
    place: tuple[Path, bool],
    options: Mapping[str, Any],
) -> None:
    """Write the responses to all prompts."""
    from ..data.text.prompts import write_answers

    start_ranks(prediction.parallel)
    with loading():
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..use.prediction import AnswerOptions, Output, answer_prompts

    prediction = replace(prediction, parallel=with_replicas(prediction.parallel))
    output = Output(*place)
    with joined(prediction.parallel) as world:
        answers = answer_prompts(
            prediction,
            path,
            overrides,
            prompts,
            world,
            output=output,
            options=AnswerOptions(**options),
            progress=partial(progress, is_shown=world.is_main),
        )
        if world.is_main:
            write_answers(output.path, prompts, answers, doing=output.on_failure)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main:
            output.remove_parts()
    if world.is_main:
        click.echo(summary(answers, output.path))


def _score(
    prediction: Prediction,
    path: str,
    overrides: Sequence[str],
    prompts: tuple[Path, DataSection | None],
    places: tuple[Path, Path],
) -> None:
    """Write the rewards of all responses of a file to the first of ``places``; their pictures are
    in the second."""
    from ..data.text.prompts import write_rows

    start_ranks(prediction.parallel)
    with loading():
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..use.prediction import read_responses, score_rows

    prediction = replace(prediction, parallel=with_replicas(prediction.parallel))
    rows, (output, media_folder) = read_responses(*prompts), places
    with joined(prediction.parallel) as world:
        shown = partial(progress, is_shown=world.is_main)
        lines, rewards = score_rows(
            prediction, path, overrides, rows, world, media_folder=media_folder, progress=shown
        )
        if world.is_main:
            write_rows(output, lines, doing="cannot write the rewards")
    if world.is_main:
        click.echo(f"{output}: {scored(rewards)}")


def scored(rewards: Sequence[Mapping[str, float]]) -> str:
    """How many responses have rewards, and of how many pairs the chosen one has the higher."""
    pairs = [row for row in rewards if "reward_chosen" in row]
    ahead = sum(row["reward_chosen"] > row["reward_rejected"] for row in pairs)
    order = f" ({ahead:,} of {len(pairs):,} pairs in order)" if pairs else ""
    return f"rewards of {counted(sum(map(len, rewards)), 'response')}{order}"


def summary(answers: Sequence[Answer], output: Path) -> str:
    """How many there are, and how many were truncated."""
    counts = Counter(answer.finish_reason for answer in answers)
    cut = [f"{counts[name]:,} {words}" for name, words in TRUNCATED.items() if counts[name]]
    noun = "answer" if len(answers) == 1 else "answers"
    return f"{output}: {len(answers):,} {noun}" + (f" ({'; '.join(cut)})" if cut else "")
