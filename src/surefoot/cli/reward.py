"""``surefoot reward check`` before a run, and ``surefoot rollouts``: responses and rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from ..errors import RunError, counted
from ..terminal_text import one_line, visible
from .loading import loading, recipe_arguments, resolved_recipe

if TYPE_CHECKING:
    from ..training.kept_rollouts import KeptRollout, KeptToken
    from ..use.reward_check import RewardCheck, RewardReport


SHOWN = 4  # responses


@click.group()
def reward() -> None:
    """Try the rewards of a recipe on sampled responses."""


@reward.command()
@recipe_arguments
@click.option(
    "--samples", default=8, type=click.IntRange(1), help="Prompts, each with a group of responses."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all responses.")
def check(recipe: Path, overrides: tuple[str, ...], *, samples: int, as_json: bool) -> None:
    """Try the rewards of RECIPE on responses that its model samples before training.

    Every response is rewarded twice: a reward that changes is not deterministic, and a run that is
    resumed would not repeat itself. Prints the range of each reward, how many responses have none,
    and how many groups have equal rewards, from which nothing is learned.

    OVERRIDES are dotted fields such as stage.grpo.group_size=4.
    """
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ..use.reward_check import check_rewards
    report = check_rewards(loaded, samples)
    if as_json:
        click.echo(visible(json.dumps(asdict(report), ensure_ascii=False, indent=2)))
        return
    for line in _lines(report):
        click.echo(one_line(line))


def _lines(report: RewardCheck) -> Iterator[str]:
    for response in report.responses[:SHOWN]:
        rewards = ", ".join(f"{name} {_number(value)}" for name, value in response.rewards.items())
        yield f"{response.origin}: {rewards}: {response.response!r}"
    for reward in report.rewards:
        yield f"{reward.name}: {_about(reward, len(report.responses))}"
    yield (
        f"{counted(report.num_groups, 'group')}, {report.num_flat_groups} with equal rewards, from "
        "which nothing is learned"
    )
    responses = counted(len(report.responses), "response")
    yield f"{responses}, each rewarded twice: {report.seconds:.1f} s"


def _about(report: RewardReport, count: int) -> str:
    parts = [
        f"from {_number(report.lowest)} to {_number(report.highest)}, mean {_number(report.mean)}",
        f"{report.num_missing} of {counted(count, 'response')} without"
        if report.num_missing
        else "",
        f"NOT deterministic: {report.num_changed} changed"
        if report.num_changed
        else "deterministic",
    ]
    return "; ".join(part for part in parts if part)


# how far the trained model's log-probability of a token is from the sampled one
LEVELS = ((0.01, ""), (0.1, "yellow"), (math.inf, "bold red"))
OF_THE_ENVIRONMENT = "dim"


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--step", type=int, help="Of the evaluation at this step; the latest one without it.")
@click.option("-n", "count", default=8, type=click.IntRange(1), help="Rollouts to show.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines of the file as they are.")
def rollouts(run: Path, *, step: int | None, count: int, as_json: bool) -> None:
    """Show what the model of RUN, a folder, answered to the first prompts of each evaluation.

    Each response has its rewards and its advantage. Tokens are colored by the ratio of their
    probabilities when they were sampled and as the trained model computes them: yellow from 1 %,
    red from 10 % apart; {ratio} follows such a token when not on a terminal. Dim text is what the
    environment said.
    """
    with loading():
        from ..training.kept_rollouts import name_of, read, read_text, steps_of
    steps = steps_of(run)
    if not steps:
        raise RunError(
            f"{run}: has no rollouts-STEP.jsonl; they are kept with the evaluations "
            "(train.eval_steps) of a stage that samples, such as grpo"
        )
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        existing = ", ".join(map(str, sorted(steps)))
        raise RunError(f"--step {step}: {run} has rollouts of the steps {existing}")
    path = run / name_of(chosen)
    if as_json:
        click.echo(visible(read_text(path)), nl=False)
        return
    _show(read(path), chosen, count)


def _show(rollouts: Sequence[KeptRollout], step: int, count: int) -> None:
    console = Console(markup=False, soft_wrap=True, highlight=False)
    shown_group = None
    for rollout in rollouts[:count]:
        if (rollout.dataset, rollout.origin, rollout.group) != shown_group:
            shown_group = rollout.dataset, rollout.origin, rollout.group
            console.print(Text(one_line(f"── {rollout.origin}"), style="bold"))
            console.print(Text(visible(rollout.prompt), style="dim"))
        console.print(Text(one_line(_figures(rollout)), style="cyan"))
        console.print(_colored(rollout.tokens, is_terminal=console.is_terminal), end="\n\n")
    shown = f", {count} shown" if count < len(rollouts) else ""
    console.print(f"step {step}: {counted(len(rollouts), 'rollout')}{shown}")


def _figures(rollout: KeptRollout) -> str:
    parts = [f"reward {_number(rollout.reward)}"]
    if len(rollout.rewards) > 1:
        parts += [f"{name} {_number(value)}" for name, value in rollout.rewards.items()]
    left_out = rollout.advantage is None
    parts.append("not trained on" if left_out else f"advantage {_number(rollout.advantage)}")
    return ", ".join([*parts, f"ended by {rollout.stop_reason}"])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _colored(tokens: Sequence[KeptToken], *, is_terminal: bool) -> Text:
    text = Text()
    for token in tokens:
        if token.sampled is None or token.trained is None:
            text.append(visible(token.text), style=OF_THE_ENVIRONMENT)
            continue
        apart = token.trained - token.sampled
        style = next(style for limit, style in LEVELS if not abs(apart) > limit)
        ratio = "" if is_terminal or not style else f"{{{math.exp(min(apart, 99.0)):.3g}}}"
        text.append(f"{visible(token.text)}{ratio}", style=style)
    return text
