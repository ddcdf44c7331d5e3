"""``surefoot plan``: the estimate of a run, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted
from ..schema.named_values import ByteSize
from ..terminal_text import in_bytes
from .loading import TakesWords, loading, recipe_arguments, resolved_recipe
from .table import console, frame, print_json, table

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe
    from ..use.estimate.failures import FailurePlan
    from ..use.estimate.plan import Plan
    from ..use.estimate.row_lengths import RowLimit

PARTS = {
    "weights": "parameters and buffers, as stored in memory",
    "gradients": "one for every parameter that is trained at once",
    "optimizer": "its states for every parameter that is trained at once",
    "activations": "saved by the forward pass for the backward pass",
    "logits": "at trained positions, with their gradients",
    "working": "temporary tensors",
    "buffers": "gathered weights, or copies in the dtype of computation",
}
SNAPSHOT = "the copy of an asynchronous save"
_NUMBERS = ("memory", "in total", "size", "a process", "difference", "tokens", "a token")


def _size(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    return None if text is None else ByteSize.from_text(text)


@click.command(cls=TakesWords)
@recipe_arguments
@click.option(
    "--num-processes",
    type=click.IntRange(1),
    metavar="N",
    help="Plan for N ranks, not for those that would be started on this machine.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    help="Plan for this kind of device, not for that of this machine.",
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Speed of all ranks together, to estimate the time.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_size,
    help="Choose model.gradient_checkpointing and train.micro_batch_size so that a rank fits in "
    "SIZE, such as 24GB.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Show what failures cost a run on N nodes, and how often to save there.",
)
@click.option(
    "--node-failures",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Of --nodes: failures in 1,000 days of a node, if not the usual 6.5.",
)
@click.option(
    "--longest-row",
    is_flag=True,
    help="Show the longest row that fits in the memory, by model.gradient_checkpointing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def plan(
    recipe: Path,
    overrides: tuple[str, ...],
    num_processes: int | None,
    device: str | None,
    tokens_per_second: float | None,
    memory: int | None,
    as_json: bool,
    **more: Any,
) -> None:
    """Estimate a run of RECIPE: steps, tokens, memory, disk, and time if the speed is known.

    No weights are read: the model's config.json is enough. One step runs on fake tensors (shapes
    without data), so the memory of saved activations is counted, not estimated by a formula. Tokens
    are those of the encoded datasets if they are in the cache, otherwise those of a sample of rows.

    With --memory, the plan is that of the recipe with the fastest model.gradient_checkpointing
    (none, selective, full, offload, in this order) with which the recipe's micro-batch fits, and
    with the largest micro-batch that fits then. A tenth of SIZE is left free.

    The speed is taken from train.output_dir/metrics.jsonl if the run has begun, unless it is given.

    With --longest-row, the longest row that fits in the memory (of --memory, or of this machine) is
    shown for each model.gradient_checkpointing, and what a further token takes: one example in a
    micro-batch, with as large a share of trained tokens as in the longest example of the data.

    With --nodes, the expected goodput is shown: the share of the time that makes progress which is
    kept, by what saves and a start have taken in this run (Young and Daly), and the interval
    between saves with which it is largest, which is that of checkpoint.save_minutes: auto. Usual
    failures are those of arXiv:2410.21680. The nodes change nothing else of the plan.

    OVERRIDES are dotted fields such as train.micro_batch_size=8. RECIPE and OVERRIDES can also be
    what `surefoot train` takes: a file of LLaMA-Factory, or its words, --stage sft ...
    """

    nodes, rate = more["nodes"], more["node_failures"]
    if rate is not None and nodes is None:
        raise click.UsageError("--node-failures is of --nodes")
    if num_processes is not None:
        overrides = (*overrides, f"parallel.num_processes={num_processes}")
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ..use.estimate.failures import FailurePlan
        from ..use.estimate.plan import as_data, fitted, make_plan, trials_of
        from ..use.estimate.row_lengths import longest_rows

    screen = Console(markup=False, stderr=True)
    with screen.status("rehearsing"):  # seconds; more for models of many layers
        loaded, machine, fitted_settings = fitted(loaded, device, memory)
        run_plan = make_plan(loaded, machine, tokens_per_second)
        rows = longest_rows(trials_of(loaded, machine), machine) if more["longest_row"] else []
    failing = None
    if nodes is not None:
        saves, folder = loaded.checkpoint, loaded.train.folder
        failing = FailurePlan.of(run_plan, saves, folder, nodes, rate)
    if as_json:
        extras: dict[str, object] = {"fitted": fitted_settings} if fitted_settings else {}
        extras |= {"failures": failing.as_data()} if failing else {}
        extras |= {"longest_rows": [vars(row) for row in rows]} if rows else {}
        print_json(as_data(run_plan) | extras | {"remarks": _remarks(loaded, run_plan)})
        return
    if fitted_settings:
        words = " ".join(f"{name}={_value(value)}" for name, value in fitted_settings.items())
        console().print(f"fits in memory: {words}", soft_wrap=True)
    show(loaded, run_plan, is_given=tokens_per_second is not None)
    if failing is not None:
        console().print(frame("failures", _failure_lines(loaded, failing)))
    if rows:
        console().print(_rows_table(rows))


def show(recipe: Recipe, run_plan: Plan, *, is_given: bool) -> None:
    """Print facts, memory and checkpoints."""
    from ..recipe.recipe_data import with_batch_sizes

    recipe, _ = with_batch_sizes(recipe, run_plan.mesh.num_data_ranks)
    screen = console()
    screen.print(frame(recipe.model.path, _lines(recipe, run_plan, is_given=is_given)))
    screen.print(_memory_table(run_plan))
    for line in (*_verdict(run_plan), *_remarks(recipe, run_plan)):
        screen.print(line, soft_wrap=True)
    screen.print()
    screen.print(_saving_table(recipe, run_plan))


def _remarks(recipe: Recipe, run_plan: Plan) -> list[str]:
    from ..training.windows import remarks

    found = [*remarks(recipe.train, recipe.optim, run_plan.examples, run_plan.course.steps)]
    shared = run_plan.shared_rows
    if shared is not None and shared.longest <= shared.tokens:
        found.append(
            f"parallel.cp: no example is longer ({shared.longest:,} tokens) than the part of a rank"
            f" ({shared.tokens:,}); with cp 1 and a smaller train.micro_batch_size, ranks compute "
            "as many tokens, and fetch nothing"
        )
    return found


def _lines(recipe: Recipe, run_plan: Plan, *, is_given: bool) -> Iterator[tuple[str, str]]:
    course, mesh = run_plan.course, run_plan.mesh
    share = run_plan.trained_parameters / run_plan.parameters
    parameters = f"{run_plan.parameters:,}, {100 * share:.3g} % of them trainable"
    if run_plan.trained_at_once < run_plan.trained_parameters:
        parameters += f", {100 * run_plan.trained_at_once / run_plan.parameters:.3g} % at once"
    yield "parameters", parameters
    where = "on GPUs" if run_plan.machine.on_gpu else "on CPUs"
    layout = f" = dp_replicate {mesh.dp_replicate} × dp_shard {mesh.dp_shard}"
    layout += f" × tp {mesh.tp}" if mesh.tp > 1 else ""
    layout += f" × pp {mesh.pp}" if mesh.pp > 1 else ""
    layout += f", of which {mesh.cp} share each row" if mesh.cp > 1 else ""
    layout = layout if mesh.num_processes > 1 else ""
    yield "processes", f"{mesh.num_processes:,}{layout}, {run_plan.precision}, {where}"
    about, source = "", "all, from the cache"
    if run_plan.rows_read is not None:  # the datasets are not encoded yet
        about, source = "about ", f"from a sample of {counted(run_plan.rows_read, 'row')}"
    yield "examples", f"{about}{run_plan.examples:,} ({source})"
    examples = counted(recipe.train.fixed_micro_batch_size, "example")
    passes = f"{course.gradient_accumulation_steps:,} × {examples} per rank"
    yield "steps", f"{course.steps:,} ({course.epochs:.3g} epochs), each of {passes}"
    longest = recipe.stage.max_new_tokens
    most = f" (all responses of max_new_tokens, {longest:,})" if longest else ""
    yield "tokens", f"{course.tokens:,}, {course.trained_tokens:,} trained{most}"
    heavy = run_plan.heaviest
    several = f"{heavy.examples:,} examples, {heavy.tokens:,} tokens, {heavy.trained:,} trained"
    yield "peak micro-batch", several
    if (shared := run_plan.shared_rows) is not None:
        fetched = f"{in_bytes(shared.fetched)} of keys and values fetched in a layer"
        yield "a rank's part of it", f"at most {shared.tokens:,} tokens, {fetched}"
    if (pictures := run_plan.pictures) is not None:
        size, (width, height) = in_bytes(pictures.num_bytes), pictures.largest
        words = f"whose layers keep {size}, by a pass of one of {width} x {height} pixels"
        yield "pictures in it", f"{pictures.count:,}, {words}"
    yield "time", _time(recipe, run_plan, is_given=is_given)


def _time(recipe: Recipe, run_plan: Plan, *, is_given: bool) -> str:
    if run_plan.seconds is None or run_plan.tokens_per_second is None:
        return "not known; set --tokens-per-second, or train a few steps first"
    source = "as given" if is_given else f"as in {recipe.train.folder / 'metrics.jsonl'}"
    return f"{duration(run_plan.seconds)} at {run_plan.tokens_per_second:,.0f} tokens/s ({source})"


def duration(seconds: float) -> str:
    """Two units, as people write it."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole} s" if minutes else f"{whole} s"


def _failure_lines(recipe: Recipe, failing: FailurePlan) -> Iterator[tuple[str, str]]:
    rate = f"{failing.failures:.3g} per 1,000 days of a node"
    between = duration(failing.between_failures)
    yield "a failure", f"each {between} on {counted(failing.nodes, 'node')} ({rate})"
    costs = failing.costs
    yield (
        "costs",
        f"a save stops training for {costs.stall:.2g} s and is committed after {costs.save:.2g} s; "
        f"{costs.detection:.2g} s until a failure is noticed, {costs.restart:.2g} s to the next "
        "step",
    )
    measured = str(recipe.train.folder / "launches.jsonl")
    yield "source", measured if failing.is_measured else "assumed: the run has saved nothing yet"
    if failing.interval is None:
        yield "goodput", "not known as it is; set --tokens-per-second, or train a few steps first"
    else:
        yield "goodput", _goodput(failing, failing.interval)
    best = failing.best_interval
    minutes = "auto" if failing.is_usual else f"{best / 60:.3g}"
    yield "at its best", f"{_goodput(failing, best)} (checkpoint.save_minutes: {minutes})"


def _goodput(failing: FailurePlan, interval: float) -> str:
    return f"{failing.goodput(interval):.2%}, with a save each {duration(interval)}"


def _memory_table(run_plan: Plan) -> Table:
    rich_table = table("memory of a process", "size", "what it is", numbers=_NUMBERS)
    for name, size in run_plan.memory.parts().items():
        if size or name in ("weights", "gradients", "optimizer"):
            rich_table.add_row(name, in_bytes(size), Text(PARTS[name], style="dim"))
    unknown = Text("without activations and logits", style="red") if run_plan.not_known else None
    if run_plan.total == run_plan.memory.peak:
        note = unknown or _capacity_note(run_plan)
        rich_table.add_row("at its peak", in_bytes(run_plan.memory.peak), note, style="bold")
        return rich_table
    rich_table.add_row("at its peak", in_bytes(run_plan.memory.peak), unknown, style="bold")
    rich_table.add_row(
        "imports", in_bytes(run_plan.imports), Text("Python and packages", style="dim")
    )
    rich_table.add_row("snapshot", in_bytes(run_plan.snapshot), Text(SNAPSHOT, style="dim"))
    rich_table.add_row("in total", in_bytes(run_plan.total), _capacity_note(run_plan), style="bold")
    return rich_table


def _capacity_note(run_plan: Plan) -> Text:
    capacity = run_plan.machine.capacity
    if capacity is not None and run_plan.total > capacity:
        return Text(f"more than the available {in_bytes(capacity)}", style="red")
    return Text("" if capacity is None else f"of {in_bytes(capacity)}", style="dim")


def _verdict(run_plan: Plan) -> Iterator[Text]:
    capacity = run_plan.machine.capacity
    if capacity is not None and run_plan.total > capacity:
        yield Text(f"add --memory {capacity / 1e9:.3g}GB to look for settings that fit")
    if run_plan.not_known is not None:
        yield Text(f"activations are not known: {run_plan.not_known}", style="red")
    if run_plan.rows_read is not None:
        yield Text(
            f"lengths are those of {counted(run_plan.rows_read, 'row')}, because the datasets are "
            "not encoded yet: a longer micro-batch may occur",
            style="dim",
        )


def _rows_table(rows: Sequence[RowLimit]) -> Table:
    rich_table = table("the longest row", "tokens", "a token", "what it is", numbers=_NUMBERS)
    for row in rows:
        tokens = f"{row.tokens:,}" if row.tokens else "none fits"
        notes = [f"takes {in_bytes(row.num_bytes)}" if row.tokens else ""]
        notes += ["the search ends there"] if row.is_least else []
        notes += [f"{in_bytes(row.main_memory)} of main memory"] if row.main_memory else []
        note = Text(", ".join(filter(None, notes)), style="dim")
        rich_table.add_row(row.policy, tokens, in_bytes(row.per_token), note)
    return rich_table


def _saving_table(recipe: Recipe, run_plan: Plan) -> Table:
    saving, size = run_plan.saving, run_plan.saving.size
    rich_table = table("checkpoints", "size", "what it is", numbers=_NUMBERS)
    shared = f", {in_bytes(size.unchanging)} shared by several" if size.unchanging else ""
    parts = f"weights {in_bytes(size.weights)}, optimizer {in_bytes(size.optimizer)}"
    rich_table.add_row("one", in_bytes(size.total), Text(f"{parts}{shared}", style="dim"))
    note = f"{saving.at_once:,} of {saving.saves:,} at a time, the one being written included"
    if recipe.checkpoint.save_minutes is not None:
        note += "; those by save_minutes not counted"
    rich_table.add_row("disk", in_bytes(saving.disk), Text(note, style="dim"))
    if saving.shared_memory:
        text = "shared memory of a rank, for asynchronous saves"
        rich_table.add_row("snapshot", in_bytes(saving.shared_memory), Text(text, style="dim"))
    return rich_table


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
