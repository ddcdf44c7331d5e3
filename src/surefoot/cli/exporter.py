"""What ``export --to NAME`` writes. ``export`` has the first of them, plugins add the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click

Progress = Callable[[int, int], None]  # gets the bytes written, and the total
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class WriteModel(Protocol):
    """Writes a model."""

    def __call__(self, path: str, out: Path, given: Mapping[str, Any], progress: Progress) -> Path:
        """Write the model at ``path`` as ``out``, and return what is written. ``given`` has the
        values of the exporter's options, of ``base``, and of ``quantize`` if it has formats."""


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """One value of ``--to``."""

    summary: str
    """What it writes, for the help of ``--to``."""

    writer: str
    """``"module:name"`` of a ``WriteModel``, which is imported when it is used."""

    options: Sequence[click.Option] = ()
    """Options of the command that mean something for it; several may have one in common."""

    formats: Sequence[str] = ()
    """Types of weights for ``--quantize``; the first is the usual one."""

    suffix: str = ""
    """Of the file that it writes; empty if OUT is a folder."""

    may_not_open: bool = False
    """Whether transformers cannot open all that it writes, so that a failure is no fault."""

    servers: Sequence[str] = ()
    """Commands that serve OUT, in place of ``{}``; printed."""

    package: str | None = None
    """The package of Python that it needs."""


def num_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """``5GB``, ``500MiB`` or a plain number as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", value.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise click.BadParameter(f"expected a size such as 5GB or 500MB, got {value!r}", ctx, param)
    return size


DTYPE = click.Option(
    ["--dtype"],
    type=click.Choice(["bfloat16", "float32", "float16"]),
    help="Type of the weights; unset, as stored (for an adapter: as in its base).",
)
MAX_SHARD_SIZE = click.Option(
    ["--max-shard-size"],
    callback=num_bytes,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest weight file; bigger models are split as Hugging Face splits them.",
)
