"""``surefoot ckpt convert``: a checkpoint as another program reads it; one line for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click

from ...address import Address
from .place import PLACE, local
from .table import JSON, print_json


@dataclass(frozen=True)
class Request:
    """What to convert, and where to."""

    checkpoint: Path
    target: Path
    base: str | None  # of an adapter, if it moved


@dataclass(frozen=True)
class Done:
    """What else there is to say of the folder that was written."""

    notes: dict[str, object] = field(default_factory=dict)  # for --json
    words: str = ""  # for people


def _to_huggingface(request: Request) -> Done:
    from ...inference import export

    export(request.checkpoint, request.target, base=request.base)
    return Done()


def _to_trainer(request: Request) -> Done:
    from ...checkpoint.folder import open_checkpoint
    from ...errors import CheckpointError
    from ...inference.opened import find_parts
    from ...interchange import save_trainer_checkpoint

    open_checkpoint(request.checkpoint)  # ours; nobody else's holds what it takes
    parts = find_parts(request.checkpoint, base=request.base)
    if parts.recipe is None:
        raise CheckpointError(
            f"{request.checkpoint}: it has no recipe.yaml, which says how its optimizer was made"
        )
    base = None if parts.adapter is None else parts.model
    arguments = save_trainer_checkpoint(
        request.checkpoint, request.target, recipe=parts.recipe, base=base
    )
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    words = f"go on with TrainingArguments(output_dir=..., {given})\n"
    words += f"and trainer.train(resume_from_checkpoint={str(request.target)!r})"
    return Done({"training_arguments": arguments}, words)


TARGETS: dict[str, Callable[[Request], Done]] = {
    "trainer": _to_trainer,
    "huggingface": _to_huggingface,
}


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT", type=PLACE)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(TARGETS)),
    required=True,
    help="trainer: what Trainer.train(resume_from_checkpoint=DST) goes on from; "
    "huggingface: weights, configuration and tokenizer, an adapter merged into its base.",
)
@click.option("--base", help="The base model of an adapter, if it moved.")
@JSON
def convert(
    checkpoint: Path | Address, target: Path, kind: str, base: str | None, as_json: bool
) -> None:
    """Write CHECKPOINT as another program reads it.

    DST is a new folder, which appears when all of it is written. CHECKPOINT stays as it is.
    """
    done = TARGETS[kind](Request(local(checkpoint), target, base))
    written = {p.name: p.stat().st_size for p in sorted(target.iterdir()) if p.is_file()}
    if as_json:
        told = {"path": str(target), "to": kind, "files": written, **done.notes}
        print_json(told)
        return
    click.echo(f"wrote {target} ({len(written)} files, {sum(written.values()):,} bytes)")
    if done.words:
        click.echo(done.words)
