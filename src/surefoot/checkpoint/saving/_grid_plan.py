"""The plan of a save of many ranks: each computes the rules of what it has, and all agree on a
digest of them. No box of a tensor with a rule is exchanged: it follows from the rule.

Each rank then reports its files, one of which is a list of the hashes of its pieces. So a report
has a few hundred bytes, however many tensors there are. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...errors import CheckpointError
from ...parallel.sharding import AxisShard, Box, FusedSlice, local_offset_and_shape
from ..disk import strict_json
from ..disk.grid import STAGES, Grid, ShardingRule, num_blocks, place_of
from ..disk.manifest import Piece
from ..state.roles import FileRole
from ._balancing import Holding, LocalTensor


def split_rules(
    holding: Holding, axes: Mapping[str, int], rank: int
) -> tuple[list[ShardingRule], dict[str, dict[str, LocalTensor]]]:
    """The rules of the tensors that ``rank`` has, and the tensors without a rule.

    A tensor has a rule if its box here is what its ``cuts`` say. Of the ranks that have copies of a
    box, each writes an equal part of it, by the first dimension.
    """
    rules, rest = [], dict[str, dict[str, LocalTensor]]()
    for role, tensors in holding.items():
        for name, tensor in tensors.items() if not FileRole(role).is_of_rank_0 else ():
            if (rule := _rule(f"{role}/{name}", tensor, axes, rank)) is not None:
                rules.append(rule)
            else:
                rest.setdefault(role, {})[name] = tensor
    return rules, rest


def _rule(
    name: str, tensor: LocalTensor, axes: Mapping[str, int], rank: int
) -> ShardingRule | None:
    cuts = tensor.cuts
    if cuts is None or isinstance(cuts, FusedSlice):
        return None
    own, place = [cut.axis for cut in cuts], place_of(rank, axes)
    if len({*own}) < len(own) or STAGES in own or not axes.keys() >= {*own}:
        return None
    if Box(*local_offset_and_shape(tensor.shape, cuts, axes, place)) != tensor.box:
        return None
    copies = [AxisShard(axis, 0) for axis in axes if axis not in (*own, STAGES)]
    every = (*cuts, *copies) if tensor.shape and Box.whole(tensor.shape).size else ()
    written = tuple(cut for cut in every if axes[cut.axis] > 1)
    return ShardingRule(name, tensor.dtype, tensor.shape, written, place.get(STAGES, 0))


def are_alike(digests: Sequence[str], axes: Mapping[str, int]) -> bool:
    """Whether all ranks of a stage have the same rules, given the digest of each rank's."""
    of_stages: dict[int, set[str]] = {}
    for rank, digest in enumerate(digests):
        of_stages.setdefault(place_of(rank, axes).get(STAGES, 0), set()).add(digest)
    return all(len(different) == 1 for different in of_stages.values())


def merged(rules_of_stages: Sequence[Sequence[ShardingRule]], axes: Mapping[str, int]) -> Grid:
    """The grid of all stages. A tensor that several have is written by the first of them. Raises
    ``CheckpointError`` if they have different ones."""
    first: dict[str, ShardingRule] = {}
    for rules in rules_of_stages:
        for rule in rules:
            known = first.setdefault(rule.tensor, rule)
            if (known.dtype, known.shape) != (rule.dtype, rule.shape):
                raise CheckpointError(
                    f"{rule.tensor}: ranks have different tensors of that name, {known.dtype} "
                    f"{list(known.shape)} and {rule.dtype} {list(rule.shape)}"
                )
    return Grid(axes, [*first.values()])


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
