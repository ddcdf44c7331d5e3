"""Options with several settings in one text, such as ``dp_shard=4,tp=2``, parsed to their types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import fields

from ..checkpoint.layouts.mindspore.strategy.parallel_config import ParallelConfig
from ..errors import CheckpointError
from ..geometry.mesh import Mesh

_MESH = "for example dp_shard=4,tp=2"
_PARALLEL_CONFIG = "for example data_parallel=2,model_parallel=4,pipeline_stage=2"
_SWITCH = {"true": True, "false": False}


def parse_mesh(text: str) -> Mesh:
    """``dp_shard=4,dp_replicate=2`` to a mesh. Raises ``CheckpointError`` for anything else."""
    known = [field.name for field in fields(Mesh)]
    odd = f"a checkpoint is sharded along {', '.join(known[:-1])} and {known[-1]}, not {{}}"
    sizes: dict[str, int] = {}
    for axis, size in _pairs(text, known, option="mesh", odd=odd, example=_MESH):
        if not (size.isascii() and size.isdecimal() and len(size) < 10):
            raise CheckpointError(
                f"mesh {text!r}: {axis} must be a whole number, got {size!r}; {_MESH}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)


def parse_parallel_config(text: str) -> ParallelConfig:
    """``data_parallel=2,model_parallel=4`` to a MindSpore configuration. Raises
    ``CheckpointError`` for anything else."""
    known = {field.name: field.type for field in fields(ParallelConfig)}
    odd, example = f"{{}} is none of {', '.join(known)}", _PARALLEL_CONFIG
    found: dict[str, int] = {}
    for name, value in _pairs(text, known, option="parallel_config", odd=odd, example=example):
        is_switch = known[name] == "bool"
        if is_switch and value.lower() in _SWITCH:
            found[name] = _SWITCH[value.lower()]
        elif not is_switch and re.fullmatch(r"-?[0-9]{1,9}", value):
            found[name] = int(value)
        else:
            kind = "true or false" if is_switch else "a whole number"
            raise CheckpointError(
                f"parallel_config {text!r}: {name} must be {kind}, got {value!r}; {example}"
            )
    return ParallelConfig(**found)  # type: ignore[arg-type]


def _pairs(
    text: str, known: Collection[str], *, option: str, odd: str, example: str
) -> Iterator[tuple[str, str]]:
    """Each name and its value. Raises ``CheckpointError`` for a name that occurs twice, and
    ``odd``, with the name in it, for an unknown one."""
    seen = set()
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else example
            raise CheckpointError(f"{option} {text!r}: {odd.format(repr(name))}; {hint}")
        if name in seen:
            raise CheckpointError(f"{option} {text!r}: {name} occurs twice")
        seen.add(name)
        yield name, value
