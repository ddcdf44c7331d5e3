"""``surefoot export``: a complete model for use elsewhere, its adapter merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from ..errors import ModelError, installation
from .weight_options import trust_remote_code_option

Progress = Callable[[int, int], None]  # gets the bytes written, and the total
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def num_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """``5GB``, ``500MiB`` or a plain number as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", value.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise click.BadParameter(f"expected a size such as 5GB or 500MB, got {value!r}", ctx, param)
    return size


USUAL = {"gguf": "f16", "gguf-adapter": "f16", "compressed-tensors": "fp8"}
GGUF = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s"),
    *("q5_0", "q4_0"),
)
SCHEMES = ("fp8", "fp8-block", "w8a8", "w4a16")
TARGETS = {
    "huggingface": ("dtype", "max_shard_size", "reward_head", "trust_remote_code"),
    "compressed-tensors": ("quantize", "group_size", "algorithm", "dtype", "max_shard_size"),
    "gguf": ("quantize",),
    "gguf-adapter": ("quantize",),
}
"""What ``--to`` writes, and the options that not all have."""
SERVERS = {
    "compressed-tensors": (
        "vllm serve {}",
        "python -m sglang.launch_server --model-path {}",
    ),
}
"""What serves it; printed."""
PACKAGES = ("gguf", "compressed_tensors")


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
    """``export PATH OUT``, and ``export verify OUT``."""

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


@click.command(cls=_Export)
@click.argument("path")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(list(TARGETS)),
    default="huggingface",
    show_default=True,
    help="A Hugging Face folder; one with quantized weights for vLLM and SGLang; one GGUF file for "
    "llama.cpp and Ollama, with a Modelfile beside it; or a LoRA adapter, not merged, as a GGUF "
    "file for a GGUF of its base.",
)
@click.option(
    "--quantize",
    type=click.Choice([*SCHEMES, *GGUF]),
    help=f"Type of the weights: of compressed-tensors {', '.join(SCHEMES)} (unset, fp8); of a GGUF "
    "file the others (unset, f16).",
)
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    help="Inputs that share a scale, with --quantize w4a16; unset, 128.",
)
@click.option(
    "--algorithm",
    type=click.Choice(["rtn", "gptq"]),
    default="rtn",
    show_default=True,
    help="How weights are rounded: to nearest; w4a16 and w8a8 also by GPTQ, on 128 rows of the "
    "run's training data, which takes longer and usually loses less.",
)
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
@trust_remote_code_option
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Open OUT with transformers, and compare it with the checkpoint (default). Skipped if "
    "the memory for the model in float32 is not there.",
)
def export(path: str, out: Path, verify: bool, **options: Any) -> None:
    """Write a model as a Hugging Face folder, with quantized weights, or as a GGUF file.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder, or a recipe. An adapter is merged into its base. OUT is new or empty: nothing is
    overwritten. It contains weights, config.json, generation_config.json, tokenizer and chat
    template, and opens with AutoModelForCausalLM.from_pretrained, a reward model with
    AutoModelForSequenceClassification. With --to gguf, OUT is a new file. Memory does not grow with
    the model, until it is verified. receipt.json says what OUT was made from.

    `surefoot export verify OUT` verifies it again.
    """
    _refuse_others(click.get_current_context(), options["to"])
    if out.suffix.lower() == ".gguf" and not options["to"].startswith("gguf"):
        raise click.UsageError(
            f"{out} is the name of a GGUF file, and --to {options['to']} writes a folder; add "
            "--to gguf, or choose another name"
        )
    found = _with_bar(lambda progress: _write(path, out, options, progress))
    click.echo(f"wrote {found}")
    if command := SERVERS.get(options["to"]):
        click.echo("".join(f"  {line.format(found)}\n" for line in command), nl=False, err=True)
    if verify and options["trust_remote_code"]:
        click.echo("not verified: the code that comes with the model is not run for it", err=True)
    elif verify:
        _verify_now(found, options["to"], options["base"])


def _verify_now(out: Path, to: str, base: str | None) -> None:
    """Verify what was written, unless that cannot be done here; delete it if it is wrong."""
    from ..inference.receipts.artefact_loading import UnopenedError
    from ..inference.receipts.receipt import delete_artefact
    from ..inference.receipts.verification import verification_cost

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
        if to == "gguf":
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
    from ..inference.receipts.verification import verify_export

    found = verify_export(out, checkpoint=checkpoint, base=base)
    result = found.comparison
    if found.quality is not None:
        click.echo(f"quality: {found.quality}")
    elif found.why_no_quality:
        click.echo(f"quality: not measured on held-out rows: {found.why_no_quality}", err=True)
    if result.is_within:
        click.echo(f"verified: {result}")
        return
    click.echo(
        f"error: {out} does not compute what its checkpoint does: {result}; do not use it",
        err=True,
    )
    raise click.exceptions.Exit(1)


def _refuse_others(ctx: click.Context, to: str) -> None:
    """Options that mean nothing for ``to`` are mistakes."""
    meant = {name for target in TARGETS if target == to for name in TARGETS[target]}
    for name in sorted({n for names in TARGETS.values() for n in names} - meant):
        if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            others = " and ".join(t for t, names in TARGETS.items() if name in names)
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} belongs to --to {others}; leave it out", ctx)


def _write(path: str, out: Path, options: dict[str, Any], progress: Progress) -> Path:
    to = options["to"]
    given = {name: options[name] for name in (*TARGETS[to], "base")}
    try:
        return WRITERS[to](path, out, given, progress)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise ModelError(
            f"--to {to} needs the package {error.name.replace('_', '-')}, which is not installed: "
            f"{installation(error.name)}"
        ) from None


def _huggingface(path: str, out: Path, given: dict[str, Any], progress: Progress) -> Path:
    from ..inference import export as write

    return write(path, out, progress=progress, **given)


def _compressed(path: str, out: Path, given: dict[str, Any], progress: Progress) -> Path:
    from ..inference.quantizing.export import QuantizeOptions, export_quantized

    quantize = _quantize("compressed-tensors", given.pop("quantize"), SCHEMES)
    size = given.pop("group_size")
    options = QuantizeOptions(None if size is None else int(size), given.pop("algorithm"))
    return export_quantized(
        path, out, quantize=quantize, options=options, progress=progress, **given
    )


def _gguf(path: str, out: Path, given: dict[str, Any], progress: Progress) -> Path:
    from ..inference.gguf.export import export_gguf

    quantize = _quantize("gguf", given["quantize"], GGUF)
    return export_gguf(path, out, base=given["base"], quantize=quantize, progress=progress)


def _gguf_adapter(path: str, out: Path, given: dict[str, Any], progress: Progress) -> Path:
    from ..inference.gguf.export import export_gguf

    quantize = _quantize("gguf-adapter", given["quantize"], GGUF)
    return export_gguf(
        path, out, base=given["base"], quantize=quantize, as_adapter=True, progress=progress
    )


def _quantize(to: str, found: str | None, known: tuple[str, ...]) -> str:
    """One of those that ``to`` has. Raises ``UsageError``."""
    if found is None:
        return USUAL[to]
    if found not in known:
        raise click.UsageError(
            f"--quantize {found} is not written by --to {to}; expected one of {', '.join(known)}"
        )
    return found


WRITERS = {
    "huggingface": _huggingface,
    "compressed-tensors": _compressed,
    "gguf": _gguf,
    "gguf-adapter": _gguf_adapter,
}


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
