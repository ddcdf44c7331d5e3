"""``surefoot predict``: responses to a file of prompts, on one process or many."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .loading import loading
from .progress import progress

if TYPE_CHECKING:
    from ..inference import Answer
    from ..inference.conversation import Ending

ENDINGS: dict[Ending, str] = {  # what is said of answers that did not come to their own end
    "length": "truncated at generate.max_new_tokens",
    "window": "truncated at the model's context length",
}


@click.command()
@click.argument("path")
@click.argument("overrides", nargs=-1)
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path),
    help="One prompt per line; or, if it ends in .jsonl, an object with prompt or messages.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file of responses, one JSON object per line.",
)
@click.option("--system", help="A system message for prompts without one.")
@click.option("--seed", type=int, default=42, show_default=True, help="Seed of sampling.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
def predict(
    path: str,
    overrides: tuple[str, ...],
    *,
    prompts: Path,
    output: Path,
    system: str | None,
    seed: int,
    force: bool,
) -> None:
    """Generate a response to each prompt of a file.

    PATH is what `surefoot chat` accepts, or a YAML file with the sections model, generate and
    parallel. OVERRIDES are dotted fields of these, such as generate.max_new_tokens=64 or
    model.dtype=bfloat16. Sampling follows the run's recipe, and is greedy if there is none.

    A model that is too large for one device is sharded over several: parallel.tp=4. The remaining
    ranks hold replicas of the model; the prompts are divided among them. Like `surefoot train`,
    this command starts the ranks itself, one for each GPU, or uses those of torchrun or SLURM.
    Responses do not depend on their number.

    OUTPUT appears when all of it is written. Each line has the fields of the prompt's line, then
    answer and ending: stop, or where it was truncated, length (generate.max_new_tokens) or window
    (the context length).
    """
    from ..data.text.answers import check_output, write_answers
    from ..data.text.prompts import read_prompts
    from ..recipe.prediction import load

    asked = load(path, overrides)  # what is wrong is said before the slow imports
    found = read_prompts(prompts)
    check_output(output, force=force)
    with loading():
        from ..parallel.launcher import launch, num_processes, rerun_command

    if (count := num_processes(asked.parallel)) > 1:
        raise SystemExit(launch(rerun_command(sys.argv[1:]), count, asked.parallel.max_restarts))
    with loading():
        from ..inference.prompt_file import PredictionOptions, answer_prompts
        from ..parallel.generation_sharding import with_replicas
        from ..parallel.world import joined

    options = PredictionOptions(path, overrides, system, seed)
    parallel = with_replicas(asked.parallel)
    with joined(parallel) as world:
        shown = partial(progress, is_shown=world.is_main)
        answers = answer_prompts(asked, options, found, world, parallel, progress=shown)
    if world.is_main:
        write_answers(output, found, answers)
        click.echo(summary(answers, output))


def summary(answers: Sequence[Answer], output: Path) -> str:
    """How many there are, and how many were truncated."""
    counts = Counter(answer.ending for answer in answers)
    cut = [f"{counts[name]:,} {words}" for name, words in ENDINGS.items() if counts[name]]
    noun = "answer" if len(answers) == 1 else "answers"
    return f"{output}: {len(answers):,} {noun}" + (f" ({'; '.join(cut)})" if cut else "")
