"""``surefoot export``: a complete model for use elsewhere, its adapter merged."""

from __future__ import annotations

import re
from pathlib import Path

import click

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def num_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """``5GB``, ``500MiB`` or a plain number as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", value.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise click.BadParameter(f"expected a size such as 5GB or 500MB, got {value!r}", ctx, param)
    return size


@click.command()
@click.argument("path")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--base", help="The base model of an adapter, if it moved.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32", "float16"]),
    help="Type of the weights; unset, as stored (for an adapter: as in its base).",
)
@click.option(
    "--max-shard-size",
    callback=num_bytes,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest weight file; bigger models are split as Hugging Face splits them.",
)
@click.option(
    "--reward-head",
    type=click.Choice(["score", "v_head", "adapter"]),
    default="score",
    show_default=True,
    help="Of a reward model: score in the layout of AutoModelForSequenceClassification, or a file "
    "with v_head beside a language model, as TRL and LLaMA-Factory read it; adapter writes a LoRA "
    "adapter that is not merged, with score, for AutoPeftModelForSequenceClassification. Of a "
    "model with the values of stage: ppo, v_head writes them, too.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
def export(path: str, out: Path, **options: object) -> None:
    """Write a model as a Hugging Face folder.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder, or a recipe. An adapter is merged into its base. OUT is new or empty: nothing is
    overwritten. It contains weights, config.json, generation_config.json, tokenizer and chat
    template, and opens with AutoModelForCausalLM.from_pretrained, a reward model with
    AutoModelForSequenceClassification. Memory does not grow with the model.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from ..inference import export as write

    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("writing", total=None)
        found = write(
            path,
            out,
            base=options["base"],  # type: ignore[arg-type]
            dtype=options["dtype"],  # type: ignore[arg-type]
            max_shard_size=options["max_shard_size"],  # type: ignore[arg-type]
            trust_remote_code=bool(options["trust_remote_code"]),
            reward_head=options["reward_head"],  # type: ignore[arg-type]
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    click.echo(f"wrote {found}")
