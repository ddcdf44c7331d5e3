"""Sharding metadata in the header of a file of boxes: the name, full shape and start of each.

The convention is that of PyTorch's distributed checkpoints in safetensors (``DCP_SHARDING_INFO``),
so that PyTorch reads these files. A file without it contains unsharded tensors. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...parallel.box import Box
from .header import Header

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
