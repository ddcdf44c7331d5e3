"""``surefoot reward``: try the rewards of a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import counted
from ..terminal_text import one_line, visible
from .loading import loading, resolved_recipe

if TYPE_CHECKING:
    from ..use.reward_check import RewardCheck, RewardReport

SHOWN = 4  # responses


@click.group()
def reward() -> None:
    """Try the rewards of a recipe on sampled responses."""


@reward.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
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
    found = check_rewards(loaded, samples)
    if as_json:
        click.echo(visible(json.dumps(asdict(found), ensure_ascii=False, indent=2)))
        return
    for line in _lines(found):
        click.echo(one_line(line))


def _lines(found: RewardCheck) -> Iterator[str]:
    for one in found.responses[:SHOWN]:
        told = ", ".join(f"{name} {_number(value)}" for name, value in one.rewards.items())
        yield f"{one.origin}: {told}: {one.response!r}"
    for report in found.rewards:
        yield f"{report.name}: {_about(report, len(found.responses))}"
    yield (
        f"{counted(found.num_groups, 'group')}, {found.num_flat_groups} with equal rewards, from "
        "which nothing is learned"
    )
    yield f"{counted(len(found.responses), 'response')}, each rewarded twice: {found.seconds:.1f} s"


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


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
