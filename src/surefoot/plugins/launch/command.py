"""``surefoot launch``: a recipe on the machines of an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile

import click

from ...cli.loading import loading, recipe_arguments
from ...errors import RunError, installation
from ...recipe.recipe import convert, load
from ...terminal_text import visible

_ENGINES = ("ray", "slurm", "kubernetes", "skypilot")


@click.command()
@recipe_arguments
@click.option("--on", type=click.Choice(_ENGINES), required=True, help="The engine.")
@click.option(
    "--nodes",
    default="1",
    show_default=True,
    metavar="N",
    help="Machines. On Ray also MIN:MAX: it trains on as many as there are.",
)
@click.option(
    "--gpus",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="G",
    help="GPUs of each node, with a rank each. Without GPUs, a node has one rank, or "
    "parallel.num_processes.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the engine, several times: an option of sbatch, image and claim of "
    "Kubernetes, accelerators of SkyPilot, address of Ray.",
)
@click.option("--name", help="Name of the job; default: that of the run's folder.")
@click.option("--dry-run", is_flag=True, help="Check everything, and print what would be run.")
def launch(
    recipe: Path,
    overrides: tuple[str, ...],
    on: str,
    nodes: str,
    gpus: int,
    settings: tuple[str, ...],
    name: str | None,
    dry_run: bool,
) -> None:
    """Train RECIPE on Ray, SLURM, Kubernetes or SkyPilot, as `surefoot train` does here.

    \b
    surefoot launch recipe.yaml --on slurm --nodes 2 --gpus 8 --set partition=gpu
    surefoot launch recipe.yaml --on ray --nodes 1:2 --gpus 1

    Errors of the recipe, missing files, and batch sizes that do not divide among the ranks are
    reported before anything is submitted. SLURM, Kubernetes and SkyPilot get a document, which
    --dry-run prints, from sbatch, kubectl or sky; the exit code is that of this program. On Ray,
    the command trains, and its exit code is that of `surefoot train`.

    A run whose number of ranks changes resumes with the same examples in the same order; losses
    agree to about 1e-6, not bitwise.
    """
    with loading():
        from .request import LaunchRequest, check_files, check_ranks, job_name, read_settings

        try:
            engine = import_module(f".{'on_ray' if on == 'ray' else on}", __package__)
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            raise RunError(f"--on ray: Ray is not installed: {installation('ray')}") from None
    counts = re.fullmatch(r"(?:([1-9]\d{0,3}):)?([1-9]\d{0,3})", nodes)
    if counts is None or (counts[1] and (on != "ray" or int(counts[1]) > int(counts[2]))):
        also = " or MIN:MAX" if on == "ray" else ""
        raise RunError(f"--nodes: expected a whole number from 1{also}, got {nodes!r}")
    if on == "ray" and convert((str(recipe), *overrides)) is not None:
        raise RunError(f"{recipe}: is another program's; write it with `surefoot recipe convert`")
    loaded = load(recipe, overrides)
    place, cache = loaded.train.output_dir, loaded.train.cache_dir
    request = LaunchRequest(
        recipe=recipe,
        overrides=overrides,
        name=job_name(name or loaded.train.run_name or place.name),
        output_dir=str(place),
        cache_dir=None if cache is None else str(cache),
        nodes=int(counts[2]),
        min_nodes=int(counts[1] or counts[2]),
        gpus=gpus,
        ranks_per_node=gpus or loaded.parallel.num_processes or 1,
        settings=read_settings(settings, engine.SETTINGS),
    )
    check_ranks(loaded, request)
    document = engine.document(request)
    if engine.SEES_FILES:
        check_files(loaded)
    click.echo(visible(f"{on}: {request}"), err=True)
    if request.nodes > 1 and engine.SEES_FILES and isinstance(place, Path):
        click.echo(visible(f"all nodes must see {loaded.train.folder} on one disk"), err=True)
    if dry_run:
        click.echo(document, nl=False)
        return
    if on == "ray":
        raise SystemExit(engine.train(loaded, request))
    raise SystemExit(_submitted(engine.PROGRAM, document))


def _submitted(program: tuple[str, ...], document: str) -> int:
    """Run the engine's own program on ``document``; its exit code. Raises ``RunError`` if it is not
    installed."""
    if shutil.which(program[0]) is None:
        raise RunError(
            f"{program[0]}: no such program on this machine; start the command where it is "
            "installed, or print the document with --dry-run"
        )
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(document)
        file.flush()
        code = subprocess.run([*program, file.name], check=False).returncode
    return 128 - code if code < 0 else code
