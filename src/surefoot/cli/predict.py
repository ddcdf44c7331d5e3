"""``surefoot predict``: responses to prompts, of a file or the command line, on any ranks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..errors import RecipeError, counted
from ..terminal_text import visible
from .loading import loading, start_ranks, thinking_option
from .table import progress
from .targets import ReadingCommand

if TYPE_CHECKING:
    from ..data.section import DataSection
    from ..data.text.prompts import Prompt
    from ..generate.generation import FinishReason
    from ..recipe.prediction import Prediction
    from ..use import Answer

TRUNCATED: dict[FinishReason | Literal["interrupted"], str] = {  # why a response is incomplete
    "length": "truncated at generate.max_new_tokens",
    "context": "truncated at the model's context length",
}


class _Predict(ReadingCommand):
    """``predict``, also in another program's words, which begin with an option of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave all options that are not its own to that program, if the first one is."""
        own = {name for param in self.get_params(ctx) for name in param.opts}
        is_other = bool(args) and args[0].startswith("--") and args[0].split("=")[0] not in own
        ctx.ignore_unknown_options = is_other
        return super().parse_args(ctx, args)


@click.command(cls=_Predict)
@click.argument("path")
@click.argument("overrides", nargs=-1)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="One prompt per line; or rows (JSON, JSON Lines, CSV, Parquet) such as a dataset's.",
)
@click.option(
    "--prompt",
    "texts",
    multiple=True,
    help="A prompt, in place of a file of them; may be repeated.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The file of responses, one JSON object per line. Unset, with --prompt: they are printed.",
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
    prompts: Path | None,
    texts: tuple[str, ...],
    output: Path | None,
    system: str | None,
    force: bool,
    **options: Any,
) -> None:
    """Generate a response to each prompt of a file, or of the command line.

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

    PATH can also be a YAML file of MindSpore Transformers with run_mode: predict, or the command
    line of its run_mindformer.py can take the place of PATH and OVERRIDES: --config FILE
    --load_checkpoint DIR --predict_data TEXT ...

    Without OUTPUT, the answers to the texts of --prompt are printed: of one text as it is, of
    several one line each, with line breaks written \\n.

    A reward model (stage rm) scores responses instead: PROMPTS are rows of a dataset, conversations
    that end in a response or pairs, and each line of OUTPUT has the fields of its row, then reward,
    or reward_chosen and reward_rejected. A classifier (stage classify) adds predicted, a label or
    the list of them, and probabilities.
    """
    from ..data.text.prompts import check_output, prompt_of, read_prompts
    from ..recipe.prediction import gives_scores, load, read_program, recipe_of

    prediction = load(path, overrides)  # what is wrong is said before the slow imports
    if prompts is None and not texts:
        texts = tuple(read_program(path, overrides)[2])
        if len(texts) == 1 and Path(texts[0]).is_file():
            prompts, texts = Path(texts[0]), ()
    if bool(texts) is (prompts is not None):
        raise RecipeError("expected one of --prompts FILE and --prompt TEXT")
    if output is not None:
        check_output(output, force=force)
    elif prompts is not None:
        raise RecipeError("--output: expected the file of the responses to --prompts")
    elif force:
        raise RecipeError("--force: has no effect without --output")
    place = None if output is None else (output, force)
    if prompts is None:
        if options["media_folder"] is not None:
            raise RecipeError("--media-folder: has no effect on --prompt; use a file of --prompts")
        prompt_rows = [prompt_of(text, f"--prompt {text!r}") for text in texts]
        _answer(prediction, path, overrides, prompt_rows, place, system=system, **options)
        return
    recipe = recipe_of(prediction.model.adapter, prediction.model.path)
    section = recipe.data if recipe else None
    options["media_folder"] = (
        options["media_folder"] or (section and section.media.folder) or prompts.parent
    )
    if not gives_scores(Path(prediction.model.path)):
        prompt_rows = read_prompts(prompts, section)
        _answer(prediction, path, overrides, prompt_rows, place, system=system, **options)
        return
    if options["thinking"] is not None:
        raise RecipeError("--thinking: has no effect on scores")
    if system is not None:
        raise RecipeError("--system: has no effect on scores; put it into the rows")
    assert output is not None  # with --prompts
    _score(prediction, path, overrides, (prompts, section), (output, options["media_folder"]))


def _answer(
    prediction: Prediction,
    path: str,
    overrides: Sequence[str],
    prompts: Sequence[Prompt],
    place: tuple[Path, bool] | None,
    *,
    system: str | None,
    thinking: bool | None,
    **options: Any,
) -> None:
    """Write the responses to all prompts to ``place``, or print them."""
    from ..data.text.prompts import write_answers

    start_ranks(prediction.parallel, ["surefoot.use.prediction"])
    with loading():
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..use.prediction import AnswerOptions, Output, answer_prompts

    prediction = replace(prediction, parallel=with_replicas(prediction.parallel))
    prompts = [prompt.with_system(system) for prompt in prompts]
    output = Output(*place) if place else None
    with joined(prediction.parallel) as world:
        answers = answer_prompts(
            prediction,
            path,
            overrides,
            prompts,
            world,
            output=output,
            options=AnswerOptions(thinks=thinking, **options),
            progress=partial(progress, is_shown=world.is_main),
        )
        if world.is_main and output:
            write_answers(output.path, prompts, answers, doing=output.on_failure)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main and output:
            output.remove_parts()
    if world.is_main and output:
        click.echo(summary(answers, output.path))
    elif world.is_main:
        _print(answers)


def _print(answers: Sequence[Answer]) -> None:
    """Each answer; a line each if there are several. Why one is incomplete is no part of it."""
    for number, answer in enumerate(answers, 1):
        text = answer.text if len(answers) == 1 else answer.text.replace("\n", "\\n")
        click.echo(visible(text) if sys.stdout.isatty() else text)
        if reason := TRUNCATED.get(answer.finish_reason):
            click.echo(f"answer {number}: {reason}", err=True)


def _score(
    prediction: Prediction,
    path: str,
    overrides: Sequence[str],
    prompts: tuple[Path, DataSection | None],
    places: tuple[Path, Path],
) -> None:
    """Write the scores of all rows of a file to the first of ``places``; their pictures are in the
    second."""
    from ..data.text.prompts import write_rows

    start_ranks(prediction.parallel, ["surefoot.use.prediction"])
    with loading():
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..recipe.prediction import recipe_of
        from ..use.model_loading import classes_of
        from ..use.prediction import read_responses, read_rows_of, score_rows

    prediction = replace(prediction, parallel=with_replicas(prediction.parallel))
    model = prediction.model
    is_reward = classes_of(recipe_of(model.adapter, model.path), [Path(model.path)]) is None
    rows = (read_responses if is_reward else read_rows_of)(*prompts)
    output, media_folder = places
    with joined(prediction.parallel) as world:
        shown = partial(progress, is_shown=world.is_main)
        lines, scores = score_rows(
            prediction, path, overrides, rows, world, media_folder=media_folder, progress=shown
        )
        if world.is_main:
            write_rows(output, lines, doing="cannot write the scores")
    if world.is_main:
        click.echo(f"{output}: {scored(scores)}")


def scored(rewards: Sequence[Mapping[str, Any]]) -> str:
    """How many responses have rewards, and of how many pairs the chosen one has the higher; of
    labels, how often each was predicted."""
    if any("predicted" in row for row in rewards):
        each = (row["predicted"] for row in rewards)
        names = Counter(n for value in each for n in ([value] if isinstance(value, str) else value))
        counts = ", ".join(f"{name} {count:,}" for name, count in names.most_common())
        return f"labels of {counted(len(rewards), 'row')} ({counts or 'none'})"
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
