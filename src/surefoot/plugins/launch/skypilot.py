"""SkyPilot: a task for `sky jobs launch`, which replaces a spot machine that is taken away.

`sky` is a program of an environment of its own: it needs another click than Surefoot.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path, PurePosixPath
from textwrap import indent

from ...errors import RunError
from ...recipe.files import read_text
from ...recipe.yaml import parse, parse_argument
from .request import SHUTDOWN, LaunchRequest

PROGRAM = ("sky", "jobs", "launch")
_RESOURCES = (
    *("accelerators", "cpus", "memory", "disk_size", "disk_tier", "image_id", "infra"),
    *("instance_type", "use_spot"),
)
SETTINGS = (*_RESOURCES, "setup", "volume", "folder", "restarts")
SEES_FILES = True  # `workdir` brings the current folder
_EXTRAS = {"s3": "[s3]", "gs": "[gs]"}  # by the scheme of a store
# Surefoot is on no package index: what has its name there is somebody else's.
_INSTALL = (
    "the lines that install Surefoot on the new machine, where only the current folder is: "
    "'pip install -e .{extra}' in a clone, or build a wheel into this folder (python -m build "
    "CLONE --outdir .) and set 'pip install \"$(ls surefoot-*.whl){extra}\"'"
)


def document(request: LaunchRequest) -> str:
    """The task, as YAML. Raises ``RunError`` if a setting is missing, or if the run would be lost
    with its machine."""
    _must_outlive_its_machine(request)
    _must_be_below_here(request)
    resources: dict[str, object] = {"use_spot": True}
    for key in _RESOURCES:
        if key in request.settings:
            resources[key] = parse_argument(request.settings[key], f"--set {key}")
    if request.gpus:
        kind = request.setting("accelerators", why="the kind of the GPUs, such as H100")
        resources["accelerators"] = f"{kind.partition(':')[0]}:{request.gpus}"
    restarts = request.number("restarts", 3)
    resources["job_recovery"] = {"max_restarts_on_errors": restarts}
    extra = _EXTRAS.get(request.output_dir.partition("://")[0], "")
    setup = request.setting("setup", why=_INSTALL.format(extra=extra))
    lines = [f"name: {json.dumps(request.name)}"]
    lines += [f"num_nodes: {request.nodes}"] if request.nodes > 1 else []
    lines += ["resources:", *(f"  {key}: {json.dumps(v)}" for key, v in resources.items())]
    if volume := request.settings.get("volume"):
        lines += ["volumes:", f"  {json.dumps(_folder(request))}: {json.dumps(volume)}"]
    lines += ["workdir: .", "setup: |", indent(setup, "  ")]
    lines += ["run: |", indent(_command(request), "  ")]
    return "\n".join(lines) + "\n"


def _command(request: LaunchRequest) -> str:
    train = f"surefoot train {shlex.join(request.words)}"
    if request.nodes == 1:
        return train
    return (
        f"torchrun --shutdown-timeout={SHUTDOWN} --nnodes={request.nodes} "
        f'--nproc-per-node={request.ranks_per_node} --node-rank="$SKYPILOT_NODE_RANK" '
        '--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port=29500 '
        f"--no-python {train}"
    )


def _folder(request: LaunchRequest) -> str:
    return request.setting("folder", "/mnt/runs")


def _must_outlive_its_machine(request: LaunchRequest) -> None:
    """Checkpoints go to a volume or to a store."""
    place, folder = request.run_folder, _folder(request)
    has_volume = "volume" in request.settings
    is_there = place is not None and PurePosixPath(place).is_relative_to(folder)
    if "://" in request.output_dir or (has_volume and is_there):
        return
    store = "" if has_volume else "a URL such as s3://bucket/run, or with --set volume=NAME "
    raise RunError(
        f"train.output_dir: {place} is on the disk of the machine, which is lost with it; set "
        f"it to {store}{folder}/{request.name}"
    )


def _must_be_below_here(request: LaunchRequest) -> None:
    """Raise ``RunError`` for a path that does not exist on the new machine: it gets the current
    folder, under another name."""
    recipe = request.recipe
    if recipe.is_absolute() or ".." in recipe.parts:
        raise RunError(
            f"{recipe}: only the current folder, {Path.cwd()}, is copied to the machine; start "
            "the command in the folder of the project, and name the recipe relative to it"
        )
    texts = [word.partition("=")[2] for word in request.overrides]
    texts += _texts(parse(read_text(recipe), str(recipe)).data)
    for text in texts:
        if text.startswith(("/", "~", "../")) and Path(text).expanduser().exists():
            raise RunError(
                f"{recipe}: {text} is not copied to the machine, only the current folder is; name "
                "it relative to that, or use a hub id"
            )


def _texts(data: object) -> list[str]:
    """All texts in plain data."""
    if isinstance(data, dict):
        return [text for value in data.values() for text in _texts(value)]
    if isinstance(data, list):
        return [text for value in data for text in _texts(value)]
    return [data] if isinstance(data, str) else []
