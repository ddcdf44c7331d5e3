"""``surefoot export``: a complete model for use elsewhere, its adapter merged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from ..errors import ModelError
from .table import reading
from .targets import TargetCommand, naming_packages, reading_of_source, target_of


@click.command("verify")
@click.argument("out", metavar="OUT", type=click.Path(exists=True, path_type=Path))
@click.option("--checkpoint", help="What it was exported from, if that moved.")
@click.option("--base", help="The base model of its adapter, if that moved.")
def verify_command(out: Path, checkpoint: str | None, base: str | None) -> None:
    """Verify OUT, which `surefoot export` wrote, against its receipt and its checkpoint.

    The files must be those that were written, and the checkpoint the one they were made from.
    Then transformers opens OUT, and computes the loss and the most probable tokens of fixed
    prompts, which are compared with those of the checkpoint. The exit code is 1 if they differ by
    more than the format explains.
    """
    _compare_alone(out, checkpoint, base)
    _verify(out, checkpoint, base)


class _Export(TargetCommand):
    """``export PATH OUT`` with the options of every target, and ``export verify OUT``."""

    usual = "huggingface is the default"
    commands: ClassVar[Mapping[str, click.Command]] = {"verify": verify_command}

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """That of the command which the first word names."""
        if not args or args[0] not in self.commands:
            if len(args) == 1 and not args[0].startswith("-"):
                # LLaMA-Factory's file says what OUT is; the error has the command to type
                from ..recipe.recipe import convert

                convert(args)
            return super().make_context(info_name, args, parent, **extra)
        command = self.commands[args[0]]
        return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@click.command(cls=_Export)
@click.argument("path")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Open OUT with transformers, and compare it with the checkpoint (default). Skipped if "
    "the memory for the model in float32 is not there.",
)
def export(path: str, out: Path, verify: bool, kind: str | None, **options: Any) -> None:
    """Write a model as a Hugging Face folder, with quantized weights, or as a GGUF file.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder, or a recipe. An adapter is merged into its base. OUT is new or empty: nothing is
    overwritten. It contains weights, config.json, generation_config.json, tokenizer and chat
    template, and opens with AutoModelForCausalLM.from_pretrained, a reward model with
    AutoModelForSequenceClassification. With --to gguf, OUT is a new file. Memory does not grow with
    the model, until it is verified. receipt.json says what OUT was made from.

    `surefoot export verify OUT` verifies it again.
    """
    from ..checkpoint.converting.targets import TARGETS, OptionError
    from ..use.exporting.conversion import export_as
    from ..use.exporting.receipt import receipt_path

    kind = kind or "huggingface"
    files = [name for name, target in TARGETS.items() if target.suffix == out.suffix.lower()]
    if out.suffix and files and TARGETS[kind].suffix != out.suffix.lower():
        raise click.UsageError(
            f"{out} is the name of a file of --to {files[0]}, and --to {kind} writes a folder; add "
            f"--to {files[0]}, or choose another name"
        )
    try:
        explicit_options = {name: value for name, value in options.items() if value}
        read_as = reading_of_source(kind, explicit_options, path, options["base"])
        to = target_of(kind, explicit_options)
        with reading("writing", None) as advance, naming_packages(to):
            written, done = export_as(path, out, to, advance, read_as)
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"wrote {written}")
    click.echo("".join(f"  {line.format(written)}\n" for line in to.servers), nl=False, err=True)
    if done.words:
        click.echo(done.words)
    if verify and options["trust_remote_code"]:
        click.echo("not verified: the code that comes with the model is not run for it", err=True)
    elif verify and receipt_path(written).exists():  # what continues a training has none
        _verify_now(written, options["base"], may_not_open=to.may_not_open)


def _verify_now(out: Path, base: str | None, *, may_not_open: bool) -> None:
    """Verify what was written, unless that cannot be done here; delete it if it is wrong."""
    from ..use.exporting.receipt import delete_artefact
    from ..use.exporting.verification import UnopenedError, verification_cost

    cost = verification_cost(out)
    try:
        _compare_alone(out, None, base)
        if not cost.fits:
            click.echo(
                f"not verified: that takes {cost.num_bytes / 1e9:.1f} GB of memory, "
                f"{cost.available / 1e9:.1f} GB are free; where there is more, run "
                f"`surefoot export verify {out}`",
                err=True,
            )
            return
        click.echo("verifying (--no-verify skips it)", err=True)
        _verify(out, None, base)
    except ModelError as error:
        if may_not_open:
            click.echo(f"not verified: {error}", err=True)  # its loader has fewer models
            return
        if isinstance(error, UnopenedError):
            delete_artefact(out)
        raise
    except click.exceptions.Exit:
        delete_artefact(out)
        click.echo(f"{out} is deleted; --no-verify writes it nevertheless", err=True)
        raise


def _compare_alone(out: Path, checkpoint: str | None, base: str | None) -> None:
    """Print what differs for a program that has nothing but what was written."""
    from ..use.exporting.verification import compare_alone

    result = compare_alone(out, checkpoint=checkpoint, base=base)
    for line in result.differences:
        click.echo(f"warning: {out} by itself: {line}", err=True)
    if result.num_prompts and not result.differences:
        click.echo(f"read by itself: {result} as in training", err=True)


def _verify(out: Path, checkpoint: str | None, base: str | None) -> None:
    """Print the result; the exit code is 1 if the artefact computes something else."""
    from ..use.exporting.verification import verify_export

    result = verify_export(out, checkpoint=checkpoint, base=base)
    if result.is_within:
        click.echo(f"verified: {result.text}")
        return
    click.echo(
        f"error: {out} does not compute what its checkpoint does: {result.text}; do not use it",
        err=True,
    )
    raise click.exceptions.Exit(1)
