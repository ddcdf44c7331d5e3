"""``surefoot ckpt convert``: a checkpoint in another layout, or as another program reads it; one
function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ...storage.address import Address
from ..table import JSON, Advance, print_json, reading
from .checkpoint_path import PLACE, local

if TYPE_CHECKING:
    from ...checkpoint.mindspore.theirs import MindSporeHints
    from ...checkpoint.sources.source import TensorSource
    from ...geometry.mesh import Mesh

LEGACY = ("legacy", "legacy-fused")
MCORE = ("mcore", "mcore-mla", "mcore-v1", "mcore-fused", "mcore-contiguous")
FAMILIES = ("keep", *LEGACY, *MCORE)
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("full", "distributed")
DtypeName = Literal["float32", "float16", "bfloat16"]
LayoutName = Literal["full", "distributed"]


@dataclass(frozen=True)
class Request:
    """What to convert, where to, and how."""

    checkpoint: Path
    target: Path
    base: str | None = None  # of an adapter if it moved, or of weights without a configuration
    layout: LayoutName = "full"
    mesh: str | None = None
    dtype: DtypeName | None = None
    trust_pickle: bool = False
    names: str | None = None  # MindSpore Transformers': of the target, or of the source
    strategy: Path | None = None  # files that say how the source's ranks cut it
    like: Path | None = None  # files that say how the target's ranks do
    parallel_config: str | None = None  # the same as settings of MindSpore Transformers
    remove_redundancy: bool = False
    iteration: bool = False  # the newer form of MindSpore Transformers 2.x


@dataclass(frozen=True)
class Done:
    """Notes about the folder that was written."""

    notes: Mapping[str, object] = field(default_factory=dict)  # for --json
    words: str = ""  # for people


def _to_surefoot(request: Request, advance: Advance) -> Done:
    from ...checkpoint.converting.resharding import reshard
    from ...checkpoint.weights import detect_layout

    mesh = read_mesh(request.mesh)
    if detect_layout(request.checkpoint) != "native" and not _is_run(request.checkpoint):
        return _weights_alone(request, mesh, advance)
    for name in ("base", "names", "strategy", "trust_pickle"):
        if getattr(request, name):
            raise click.UsageError(
                f"--{name.replace('_', '-')} cannot be used with a Surefoot checkpoint, which "
                "contains all that is needed"
            )
    reshard(
        request.checkpoint,
        request.target,
        layout=request.layout,
        mesh=mesh,
        dtype=request.dtype,
        progress=advance,
    )
    notes = {"layout": request.layout, "mesh": mesh.axes}
    return Done(notes, f"resume from it with checkpoint.resume={request.target}")


def _weights_alone(request: Request, mesh: Mesh, advance: Advance) -> Done:
    from ...inference.converted import write_checkpoint

    base = None if request.base is None else _model(request.base)
    write_checkpoint(
        request.checkpoint,
        request.target,
        theirs=_theirs(request, base),
        layout=request.layout,
        mesh=mesh,
        dtype=request.dtype,
        trust_pickle=request.trust_pickle,
        progress=advance,
    )
    is_adapter = (request.target / "adapter_config.json").exists()
    setting = "adapter" if is_adapter else "path"
    notes = {"layout": request.layout, "mesh": mesh.axes}
    return Done(notes, f"weights only: start from them with model.{setting}={request.target}")


def _to_huggingface(request: Request, advance: Advance) -> Done:
    from ...checkpoint.mindspore.ranks import model_near
    from ...checkpoint.weights import detect_layout
    from ...inference import export
    from ...inference.converted import write_model

    kind = detect_layout(request.checkpoint)
    if kind not in (None, "dcp", "mindspore") or _is_run(request.checkpoint):
        before = 0

        def tell(done: int, _total: int) -> None:
            nonlocal before
            advance(done - before)
            before = done

        export(
            request.checkpoint,
            request.target,
            base=request.base,
            dtype=request.dtype,
            progress=tell,
        )
        return Done()
    base = None if request.base is None else _model(request.base)
    source = _open_theirs(request, base)
    near = model_near(request.checkpoint)
    write_model(
        source, request.target, base=base, beside_it=near, dtype=request.dtype, progress=advance
    )
    words = "weights only: its config.json and tokenizer are those of the model it comes from; "
    return Done(words="" if base or near else words + "--base MODEL copies them")


def _is_run(folder: Path) -> bool:
    from ...checkpoint.disk.commit import named

    return bool(named(folder))


def _model(path: str) -> Path:
    from ...inference import locate

    return locate(path).folder


def _open_theirs(request: Request, base: Path | None = None) -> TensorSource:
    """Foreign weights, under Hugging Face's names."""
    from ...checkpoint.mindspore.theirs import open_model
    from ...checkpoint.weights import detect_layout
    from ...interchange.source import open_source

    if detect_layout(request.checkpoint) == "mindspore":
        return open_model(request.checkpoint, _theirs(request, base))
    return open_source(request.checkpoint, trust_pickle=request.trust_pickle)


def _theirs(request: Request, base: Path | None) -> MindSporeHints:
    from ...checkpoint.mindspore.theirs import MindSporeHints

    return MindSporeHints(request.strategy, request.names, base)


def _to_mindspore(request: Request, advance: Advance) -> Done:
    from ...checkpoint.mindspore.rewrite import TargetFormat, rewrite
    from ...checkpoint.weights import detect_layout
    from ..option_text import parse_parallel_config

    config = request.parallel_config
    wanted = TargetFormat(
        request.layout,
        None if config is None else parse_parallel_config(config),
        request.like,
        request.names,
        request.dtype,
        request.remove_redundancy,
        request.iteration,
    )
    base = None if request.base is None else _model(request.base)
    folder, target, theirs = request.checkpoint, request.target, _theirs(request, base)
    theirs = replace(theirs, names=None)
    if detect_layout(folder) == "mindspore":
        rewrite(folder, target, wanted, theirs=theirs, progress=advance)
    else:
        from ...inference.mindspore import write_mindspore  # which takes seconds to import

        trust = request.trust_pickle
        write_mindspore(folder, target, wanted, theirs=theirs, trust_pickle=trust, progress=advance)
    notes = {"layout": request.layout}
    if request.iteration:
        return Done(notes, f"read it with checkpoint: {{load_path: {request.target}}}")
    inner = "/checkpoint" if request.layout == "distributed" else ""
    words = f"read it with load_checkpoint: {request.target}{inner}"
    return Done(notes, f"{words}, load_ckpt_format: safetensors")


def _to_peft(request: Request, advance: Advance) -> Done:
    from ...inference.converted import write_adapter

    write_adapter(request.checkpoint, request.target, dtype=request.dtype, progress=advance)
    return Done()


def _to_dcp(request: Request, advance: Advance) -> Done:
    from ...checkpoint.dcp_write import write_dcp
    from ...inference.converted import companions

    source = _open_theirs(request)
    mesh = read_mesh(request.mesh)
    write_dcp(
        source,
        request.target,
        mesh=mesh,
        dtype=request.dtype,
        small=companions(request.checkpoint, source),
        progress=advance,
    )
    reader = f"HuggingFaceStorageReader({str(request.target)!r})"
    return Done({"mesh": mesh.axes}, f"read it with dcp.load(..., storage_reader={reader})")


def _to_trainer(request: Request, _advance: Advance) -> Done:
    from ...checkpoint.disk.folder import open_checkpoint
    from ...errors import CheckpointError
    from ...inference.model_loading import find_parts
    from ...interchange import save_trainer_checkpoint

    open_checkpoint(request.checkpoint)  # ours; nobody else's holds what it takes
    parts = find_parts(request.checkpoint, base=request.base)
    if parts.recipe is None:
        raise CheckpointError(
            f"{request.checkpoint}: it has no recipe.yaml, which contains the settings of its "
            "optimizer"
        )
    base = None if parts.adapter is None else parts.model
    arguments = save_trainer_checkpoint(
        request.checkpoint, request.target, recipe=parts.recipe, base=base
    )
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    words = f"resume with TrainingArguments(output_dir=..., {given})\n"
    words += f"and trainer.train(resume_from_checkpoint={str(request.target)!r})"
    return Done({"training_arguments": arguments}, words)


def read_mesh(text: str | None) -> Mesh:
    """The mesh of ``--mesh``; one rank if it is not given."""
    from ...geometry.mesh import Mesh
    from ..option_text import parse_mesh

    return Mesh() if text is None else parse_mesh(text)


TARGETS: dict[str, Callable[[Request, Advance], Done]] = {
    "surefoot": _to_surefoot,
    "huggingface": _to_huggingface,
    "peft": _to_peft,
    "trainer": _to_trainer,
    "dcp": _to_dcp,
    "mindspore": _to_mindspore,
}
_THEIRS = ("like", "parallel_config", "remove_redundancy", "iteration")
# The options that mean something for each target, beside SRC and DST.
_TAKES = {
    "surefoot": {"layout", "mesh", "dtype", "base", "trust_pickle", "names", "strategy"},
    "huggingface": {"base", "dtype", "trust_pickle", "names", "strategy"},
    "peft": {"dtype"},
    "trainer": {"base"},
    "dcp": {"mesh", "dtype", "trust_pickle", "names", "strategy"},
    "mindspore": {"layout", "base", "dtype", "trust_pickle", "names", "strategy", *_THEIRS},
}

LAYOUT = click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    help="Layout of the Surefoot checkpoint: full (unsharded tensors), or distributed (one "
    "folder of shards per rank).",
)
MESH = click.option(
    "--mesh",
    metavar="AXIS=N[,AXIS=N]",
    help="The mesh whose shards are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …",
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Dtype of the weights; the optimizer state is not changed.",
)


FILES = click.Path(exists=True, path_type=Path)
NAMES = click.option(
    "--names",
    type=click.Choice(FAMILIES),
    help="MindSpore Transformers' names of the weights, in DST or, with --to huggingface, in "
    "SRC; keep: unchanged.",
)
STRATEGY = click.option(
    "--strategy", type=FILES, help="MindSpore's strategy files of SRC, if not beside its ranks."
)
LIKE = click.option(
    "--like", type=FILES, help="Strategy files that define how DST is sharded over its ranks."
)
PARALLEL = click.option(
    "--parallel-config",
    metavar="NAME=N[,NAME=N]",
    help="How DST is sharded over MindSpore's ranks: data_parallel=2,model_parallel=4, "
    "pipeline_stage, enable_parallel_optimizer=true, optimizer_weight_shard_size, "
    "parallel_optimizer_threshold, vocab_emb_dp=false.",
)
ONCE = click.option(
    "--remove-redundancy",
    is_flag=True,
    help="Write replicated slices once (do not store them on every rank).",
)

ITERATION = click.option(
    "--iteration",
    is_flag=True,
    help="With --to mindspore: the newer form of MindSpore Transformers 2.x, iteration_N.",
)


@click.command()
@click.argument("checkpoint", metavar="SRC", type=PLACE)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(TARGETS)),
    help="surefoot (the default with --layout or --mesh): a Surefoot checkpoint; huggingface: "
    "weights, configuration and tokenizer, an adapter merged into its base; peft: an "
    "adapter alone; trainer: what Trainer.train(resume_from_checkpoint=DST) resumes from; "
    "dcp: weights for PyTorch's distributed checkpoints; mindspore: weights for MindSpore "
    "Transformers, unsharded or by rank.",
)
@LAYOUT
@MESH
@DTYPE
@click.option(
    "--base",
    help="The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed).",
)
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Read the pickles of a checkpoint of DeepSpeed, or of PyTorch's DCP, as inert records.",
)
@NAMES
@STRATEGY
@LIKE
@PARALLEL
@ONCE
@ITERATION
@JSON
def convert(
    checkpoint: Path | Address, target: Path, kind: str | None, as_json: bool, **options: object
) -> None:
    """Write SRC, a checkpoint, in another layout or as another program reads it.

    DST is a new folder, which appears when all of it is written. SRC is not changed. Tensors are
    copied from file to file: no model is built, and memory does not grow with it.
    """
    kind = kind or _usual(options)
    _refuse_meaningless(kind, options)
    folder = local(checkpoint)
    given = {name: value for name, value in options.items() if value is not None}
    with reading("converting", None) as advance:
        done = TARGETS[kind](Request(folder, target, **given), advance)  # type: ignore[arg-type]
    paths = [path for path in sorted(target.rglob("*")) if path.is_file()]
    written = {str(path.relative_to(target)): path.stat().st_size for path in paths}
    if as_json:
        told = {"path": str(target), "to": kind, "files": written, **done.notes}
        print_json(told)
        return
    click.echo(f"wrote {target} ({len(written)} files, {sum(written.values()):,} bytes)")
    if done.words:
        click.echo(done.words)


def _usual(options: dict[str, object]) -> str:
    if options["layout"] is None and options["mesh"] is None:
        names = f"--to ({', '.join(TARGETS)}) or --layout ({', '.join(LAYOUTS)})"
        raise click.UsageError(f"expected what to write: {names}")
    return "surefoot"


def _refuse_meaningless(kind: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        if value and name not in _TAKES[kind]:
            option = f"--{name.replace('_', '-')}"
            takes = ", ".join(f"--{n.replace('_', '-')}" for n in sorted(_TAKES[kind]))
            raise click.UsageError(
                f"{option} cannot be used with --to {kind}, which accepts {takes}"
            )
    if kind == "surefoot" and options["mesh"] and options["layout"] != "distributed":
        raise click.UsageError("--mesh needs --layout distributed; layout full is not sharded")
