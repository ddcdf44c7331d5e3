"""What a rank of a grid reports: its files, and a list of the hashes of its pieces, which is one of
them. Its report has a few hundred bytes, however many tensors there are. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from ..disk import strict_json
from ..disk.grid import (
    BLOCK,
    HASH_LIST,
    Grid,
    num_blocks,
    parse_grid,
)

if TYPE_CHECKING:
    from ._writing import Content, Job, Written


def grid_of(job: Job) -> Grid | None:
    """The grid by whose rules ``job`` is written; None if there are none."""
    return None if job.grid is None else parse_grid(job.grid, job.mesh, "the plan of the save")


def write_hash_list(job: Job, grid: Grid, written: Written, content: Content, folder: Path) -> None:
    """Write the hash list of this rank, and take the pieces in it out of ``written``.

    Raises ``CheckpointError`` if they are not what the rules say: rank 0, which commits, does not
    see them.
    """
    name, shards = HASH_LIST.format(job.rank), {shard.plan.name: shard for shard in job.shards}
    boxes, by_file = dict[str, Box](), dict[str, dict[str, list[str]]]()
    for piece in written.pieces:
        if piece.tensor not in grid.rule_of:
            continue
        blocks: Sequence[str] = piece.blocks  # of a file that was linked to the parent's
        if num_blocks(piece.num_bytes) and not blocks:
            blocks = content.blocks(shards[piece.file], piece.key, BLOCK)
        boxes[piece.tensor] = piece.box
        hashes = by_file.setdefault(piece.file.rpartition("/")[2], {})
        hashes[piece.tensor] = [piece.hash, *blocks]
    if boxes != grid.boxes_of(job.rank):
        raise CheckpointError("the boxes of this rank do not follow from the rules of the save")
    data, path = strict_json.dump(by_file, indent=0), folder / name
    if not files.is_folder(path.parent):  # but not the one around it, which may have been given up
        files.new_folder(path.parent)
    files.write_new(path, data)
    written.files[name], written.hashes[name] = len(data), files.digest(data)
    written.pieces = [piece for piece in written.pieces if piece.tensor not in boxes]
