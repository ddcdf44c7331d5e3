"""What a rank of a grid reports: its files, and a list of the hashes of its pieces, which is one of
them. Its report has a few hundred bytes, however many tensors there are. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...storage import files
from ..disk.grid import (
    BLOCK,
    HASH_LIST,
    Grid,
    Listed,
    check_list,
    dump_list,
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
    listed = {}
    for piece in written.pieces:
        if piece.tensor not in grid.rule_of:
            continue
        blocks = piece.blocks  # of a file that was linked to the parent's
        if num_blocks(piece.num_bytes) and not blocks:
            blocks = tuple(content.blocks(shards[piece.file], piece.key, BLOCK))
        file = piece.file.rpartition("/")[2]
        listed[piece.tensor] = Listed(piece.box, file, piece.hash, blocks)
    check_list(listed, grid, job.rank, str(folder / name))
    data, path = dump_list(listed), folder / name
    if not files.is_folder(path.parent):  # but not the one around it, which may have been given up
        files.new_folder(path.parent)
    files.write_new(path, data)
    written.files[name], written.hashes[name] = len(data), files.digest(data)
    written.pieces = [piece for piece in written.pieces if piece.tensor not in listed]
