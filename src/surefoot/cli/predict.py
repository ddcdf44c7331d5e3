"""``surefoot predict``: responses to a file of prompts, on one process or many."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .loading import loading
from .progress import progress

if TYPE_CHECKING:
    from ..data.text.prompts import Prompt
    from ..inference import Answer
    from ..inference.conversation import Ending
    from ..recipe.prediction import Prediction

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
    from ..data.text.prompts import read_prompts
    from ..recipe.prediction import load

    asked = load(path, overrides)  # what is wrong is said before the slow imports
    found = read_prompts(prompts)
    _refuse_taken(output, force=force)
    with loading():
        from ..parallel.launch import launch, num_processes, rerun_command

    if (count := num_processes(asked.parallel)) > 1:
        raise SystemExit(launch(rerun_command(sys.argv[1:]), count, asked.parallel.max_restarts))
    answers = _answers(asked, (path, overrides), found, system, seed)
    if answers is not None:
        _write(output, found, answers)
        click.echo(summary(answers, output))


def _answers(
    asked: Prediction,
    told: tuple[str, Sequence[str]],
    prompts: Sequence[Prompt],
    system: str | None,
    seed: int,
) -> list[Answer] | None:
    """The responses, on the rank that writes them."""
    with loading():
        from ..inference import open_model, predict
        from ..parallel.generation_sharding import with_replicas
        from ..parallel.world import joined
        from ..recipe.prediction import load

    model, parallel = asked.model, with_replicas(asked.parallel)
    with joined(parallel) as world:
        opened = open_model(
            model.path,
            adapter=model.adapter,
            base=model.base,
            weights=model.weights,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            world=world,
            parallel=parallel,
        )
        section = load(*told, generate=opened.generate).generate
        with progress("answers", len(prompts), is_shown=world.is_main) as advance:
            found = predict(opened, prompts, section, system=system, seed=seed, on_answered=advance)
        return found if world.is_main else None


def _refuse_taken(output: Path, *, force: bool) -> None:
    """Check first that nothing is overwritten by mistake, and that the folder can be written."""
    from ..errors import RunError
    from ..storage.files import make_folder, raising

    if output.is_dir():
        raise RunError(f"--output {output}: is a folder; expected the name of a file")
    if output.exists() and not force:
        raise RunError(f"--output {output}: it exists; choose another name, or add --force")
    with raising(RunError, "cannot write the answers"):
        make_folder(output.absolute().parent)


def _write(output: Path, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> None:
    from ..errors import RunError
    from ..storage.files import raising, write_aside

    lines = [
        json.dumps(
            {**prompt.row, "answer": answer.text, "ending": answer.ending}, ensure_ascii=False
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    with raising(RunError, "cannot write the answers"):
        write_aside(output, ("\n".join(lines) + "\n").encode(errors="replace"))


def summary(answers: Sequence[Answer], output: Path) -> str:
    """How many there are, and how many were truncated."""
    counts = Counter(answer.ending for answer in answers)
    cut = [f"{counts[name]:,} {words}" for name, words in ENDINGS.items() if counts[name]]
    noun = "answer" if len(answers) == 1 else "answers"
    return f"{output}: {len(answers):,} {noun}" + (f" ({'; '.join(cut)})" if cut else "")
