"""Rows for new tokens, read in any boxes."""

import pytest
import torch

from surefoot.checkpoint.sources import TensorsInMemory
from surefoot.parallel.sharding import Box
from surefoot.use.exporting.conversion import Grown

WEIGHT = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
GROWN = Grown(TensorsInMemory({"embed": WEIGHT, "other": WEIGHT}), frozenset({"embed"}), 8)
WHOLE = torch.cat([WEIGHT, WEIGHT.double().mean(0).float().expand(3, 3)])


def test_only_the_named_ones_grow():
    assert GROWN.shapes() == {"embed": (8, 3), "other": (5, 3)}
    assert GROWN.dtypes() == {"embed": torch.float32, "other": torch.float32}
    assert torch.equal(GROWN.read("other", Box((1, 0), (2, 3))), WEIGHT[1:3])


@pytest.mark.parametrize(
    "box",
    [Box((0, 0), (8, 3)), Box((0, 1), (3, 2)), Box((3, 0), (4, 1)), Box((6, 1), (2, 2))],
    ids=str,
)
def test_old_rows_are_kept_and_new_ones_are_their_mean(box):
    expected = WHOLE[box.slices_in(Box.whole((8, 3)))]
    assert torch.equal(GROWN.read("embed", box), expected)


def test_the_type_is_kept():
    grown = Grown(TensorsInMemory({"embed": WEIGHT.bfloat16()}), frozenset({"embed"}), 8)
    assert grown.read("embed", Box.whole((8, 3))).dtype == torch.bfloat16
