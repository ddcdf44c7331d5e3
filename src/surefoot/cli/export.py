"""``surefoot export``: a complete model for use elsewhere, its adapter merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import click

from ..errors import ModelError, installation
from ..extensions import Extended
from .exporter import DTYPE, MAX_SHARD_SIZE, Exporter, Progress, WriteModel
from .weight_options import TRUST_REMOTE_CODE


def _huggingface(path: str, out: Path, given: Mapping[str, Any], progress: Progress) -> Path:
    from ..use import export as write

    return write(path, out, progress=progress, **given)


EXPORTERS: Extended[Exporter] = Extended(
    "exporters",
    {
        "huggingface": Exporter(
            summary="a Hugging Face folder",
            writer=f"{__name__}:_huggingface",
            options=(
                DTYPE,
                MAX_SHARD_SIZE,
                click.Option(
                    ["--reward-head"],
                    type=click.Choice(["score", "v_head"]),
                    default="score",
                    show_default=True,
                    help="Of a reward model: score in the layout of "
                    "AutoModelForSequenceClassification, or a file with v_head beside a language "
                    "model, as other trainers read it. Of a model with the values of stage: ppo, "
                    "v_head writes them, too.",
                ),
                TRUST_REMOTE_CODE,
            ),
        ),
    },
)


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
    _verify(out, checkpoint, base)


class _Export(click.Command):
    """``export PATH OUT`` with the options of every exporter, and ``export verify OUT``."""

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
            return super().make_context(info_name, args, parent, **extra)
        command = self.commands[args[0]]
        return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own, and after its arguments ``--to``, ``--quantize`` and those of the exporters."""
        own = super().get_params(ctx)
        first = sum(isinstance(param, click.Argument) for param in own)
        theirs = [option for one in EXPORTERS.values() for option in one.options]
        made = [_to(), _quantize(), *dict.fromkeys(theirs)]
        return [*own[:first], *made, *own[first:]]


def _to() -> click.Option:
    summaries = "; ".join(f"{name}: {one.summary}" for name, one in EXPORTERS.items())
    return click.Option(
        ["--to"],
        type=click.Choice(list(EXPORTERS)),
        default="huggingface",
        show_default=True,
        help=f"What to write. {summaries}.",
    )


def _quantize() -> click.Option:
    formats = {name: one.formats for name, one in EXPORTERS.items() if one.formats}
    known = dict.fromkeys(one for names in formats.values() for one in names)
    said = "; ".join(f"{name}: {', '.join(names)}" for name, names in formats.items())
    text = f"Type of the weights; unset, the first that is named here. {said}."
    return click.Option(["--quantize"], type=click.Choice(list(known)), help=text)


@click.command(cls=_Export)
@click.argument("path")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--base", help="The base model of an adapter, if it moved.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Open OUT with transformers, and compare it with the checkpoint (default). Skipped if "
    "the memory for the model in float32 is not there.",
)
def export(path: str, out: Path, verify: bool, to: str, **options: Any) -> None:
    """Write a model as a Hugging Face folder, with quantized weights, or as a GGUF file.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder, or a recipe. An adapter is merged into its base. OUT is new or empty: nothing is
    overwritten. It contains weights, config.json, generation_config.json, tokenizer and chat
    template, and opens with AutoModelForCausalLM.from_pretrained, a reward model with
    AutoModelForSequenceClassification. With --to gguf, OUT is a new file. Memory does not grow with
    the model, until it is verified. receipt.json says what OUT was made from.

    `surefoot export verify OUT` verifies it again.
    """
    exporter = EXPORTERS[to]
    _refuse_others(click.get_current_context(), to)
    files = [name for name, one in EXPORTERS.items() if one.suffix == out.suffix.lower()]
    if out.suffix and files and exporter.suffix != out.suffix.lower():
        raise click.UsageError(
            f"{out} is the name of a file of --to {files[0]}, and --to {to} writes a folder; add "
            f"--to {files[0]}, or choose another name"
        )
    found = _with_bar(lambda progress: _write(to, path, out, options, progress))
    click.echo(f"wrote {found}")
    click.echo(
        "".join(f"  {line.format(found)}\n" for line in exporter.servers), nl=False, err=True
    )
    if verify and options["trust_remote_code"]:
        click.echo("not verified: the code that comes with the model is not run for it", err=True)
    elif verify:
        _verify_now(found, options["base"], may_not_open=exporter.may_not_open)


def _verify_now(out: Path, base: str | None, *, may_not_open: bool) -> None:
    """Verify what was written, unless that cannot be done here; delete it if it is wrong."""
    from ..use.receipts.receipt import delete_artefact
    from ..use.receipts.verification import UnopenedError, verification_cost

    cost = verification_cost(out)
    if not cost.fits:
        click.echo(
            f"not verified: that takes {cost.num_bytes / 1e9:.1f} GB of memory, "
            f"{cost.available / 1e9:.1f} GB are free; where there is more, run "
            f"`surefoot export verify {out}`",
            err=True,
        )
        return
    if cost.seconds > 20:
        minutes = max(1, round(cost.seconds / 60))
        click.echo(f"verifying, about {minutes} min (--no-verify skips it)", err=True)
    try:
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


def _verify(out: Path, checkpoint: str | None, base: str | None) -> None:
    """Print the result; the exit code is 1 if the artefact computes something else."""
    from ..use.receipts.verification import verify_export

    result = verify_export(out, checkpoint=checkpoint, base=base)
    if result.is_within:
        click.echo(f"verified: {result}")
        return
    click.echo(
        f"error: {out} does not compute what its checkpoint does: {result}; do not use it",
        err=True,
    )
    raise click.exceptions.Exit(1)


def _names(exporter: Exporter) -> set[str]:
    """The parameters of the command that mean something for it."""
    found = {str(option.name) for option in exporter.options}
    return found | {"quantize"} if exporter.formats else found


def _refuse_others(ctx: click.Context, to: str) -> None:
    """Options that mean nothing for ``to`` are mistakes."""
    names = {target: _names(one) for target, one in EXPORTERS.items()}
    for name in sorted(set[str]().union(*names.values()) - names[to]):
        if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            others = " and ".join(target for target in names if name in names[target])
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} belongs to --to {others}; leave it out", ctx)


def _write(to: str, path: str, out: Path, options: dict[str, Any], progress: Progress) -> Path:
    exporter = EXPORTERS[to]
    given = {name: options[name] for name in (*_names(exporter), "base")}
    if exporter.formats:
        given["quantize"] = chosen = given["quantize"] or exporter.formats[0]
        if chosen not in exporter.formats:
            expected = ", ".join(exporter.formats)
            raise click.UsageError(
                f"--quantize {chosen} is not written by --to {to}; expected one of {expected}"
            )
    try:
        module, _, name = exporter.writer.partition(":")
        writer: WriteModel = getattr(import_module(module), name)
        return writer(path, out, given, progress)
    except ModuleNotFoundError as error:
        if error.name is None or error.name != exporter.package:
            raise
        raise ModelError(
            f"--to {to} needs the package {error.name.replace('_', '-')}, which is not installed: "
            f"{installation(error.name)}"
        ) from None


def _with_bar(write: Callable[[Callable[[int, int], None]], Path]) -> Path:
    """Call ``write`` with something to report the bytes written to, and their total."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("writing", total=None)
        return write(lambda done, total: bar.update(task, completed=done, total=total))
