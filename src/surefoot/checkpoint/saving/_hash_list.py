"""What a rank of a grid reports: its files, and a list of the hashes of its pieces, which is one of
them. So a report has a few hundred bytes, however many tensors there are. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...errors import CheckpointError
from ...parallel.sharding import Box
from ..disk import strict_json
from ..disk.grid import Grid, num_blocks
from ..disk.manifest import Piece


def hash_list(
    pieces: Iterable[Piece], grid: Grid, rank: int, blocks_of: Callable[[Piece], Sequence[str]]
) -> tuple[bytes, list[Piece]]:
    """The hash list of ``rank``, and those of its ``pieces`` that have no rule.

    Raises ``CheckpointError`` if the others are not what the rules say: rank 0, which commits, does
    not see them.
    """
    boxes, by_file = dict[str, Box](), dict[str, dict[str, list[str]]]()
    rest = []
    for piece in pieces:
        if piece.tensor not in grid.rule_of:
            rest.append(piece)
            continue
        blocks: Sequence[str] = piece.blocks  # of a file that was linked to the parent's
        if num_blocks(piece.num_bytes) and not blocks:
            blocks = blocks_of(piece)
        boxes[piece.tensor] = piece.box
        hashes = by_file.setdefault(piece.file.rpartition("/")[2], {})
        hashes[piece.tensor] = [piece.hash, *blocks]
    if boxes != grid.boxes_of(rank):
        raise CheckpointError("the boxes of this rank do not follow from the rules of the save")
    return strict_json.dump(by_file, indent=0), rest
