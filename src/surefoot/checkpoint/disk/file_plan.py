"""Plan which tensor is stored in which file at which byte. Pure; no torch here.

Tensors are not split; files have a bounded size and Hugging Face's names.

A file of boxes has in its header the name, full shape and start of each: the convention of
PyTorch's distributed checkpoints in safetensors (``DCP_SHARDING_INFO``), so that PyTorch reads
these files. A file without it contains unsharded tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...parallel.box import Box
from .tensorfile import Header, build, num_bytes

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


@dataclass(frozen=True)
class FilePlan:
    """A planned safetensors file: its first bytes, and the position of every tensor after them."""

    name: str
    head: bytes
    header: Header


def plan_save(
    stem: str,
    tensors: Tensors,
    max_shard_size: int | None,
    *,
    apart: Collection[str] = (),
    boxes: Boxes | None = None,
) -> list[FilePlan]:
    """Files for ``tensors``: one, or several of at most ``max_shard_size`` bytes of tensors each.

    Tensors keep their order over the files, so that a layer stays together; a tensor that is larger
    than the limit has its own file. Those ``apart`` come first, in files of their own. ``boxes``
    gives the box of each tensor that is a part; every file's header then contains it.
    """
    aside = {name: described for name, described in tensors.items() if name in apart}
    rest = {name: described for name, described in tensors.items() if name not in apart}
    groups = [group for part in (aside, rest) if part for group in _groups(part, max_shard_size)]
    if len(groups) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [
            f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)
        ]
    plans = []
    for name, group in zip(names, groups, strict=True):
        told = None if boxes is None else explain({key: boxes[key] for key in group})
        plans.append(FilePlan(name, *build(group, told)))
    return plans


def _groups(tensors: Tensors, limit: int | None) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = num_bytes(dtype, shape)
        if limit is not None and groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, shape)
        filled += size
    return groups


VERSION_KEY, VERSION = "DCP_VERSION", "1.0"
INFO_KEY, START_KEY, SHAPE_KEY = "DCP_SHARDING_INFO", "saved_offsets", "shape"

Boxes = Mapping[str, tuple[tuple[int, ...], Box]]  # key -> the tensor's whole shape, the box of it


def explain(boxes: Boxes) -> dict[str, str]:
    """The header's metadata for a file that holds these boxes."""
    told = {
        key: {START_KEY: list(box.start), SHAPE_KEY: list(shape)}
        for key, (shape, box) in sorted(boxes.items())
    }
    return {VERSION_KEY: VERSION, INFO_KEY: json.dumps(told, separators=(",", ":"))}


def explained(header: Header) -> Boxes:
    """The boxes in a file, according to its header."""
    told = json.loads(header.metadata.get(INFO_KEY, "{}"))
    found = {}
    for key, entry in header.entries.items():
        start, shape = (0,) * len(entry.shape), entry.shape
        if key in told:
            start, shape = tuple(told[key][START_KEY]), tuple(told[key][SHAPE_KEY])
        found[key] = shape, Box(start, entry.shape)
    return found
