"""To add an axis is to name it, and to give it a size: nothing else knows axes by their place."""

from dataclasses import dataclass

import pytest

import ranks
from spread import learn, trainer
from surefoot.parallel import section as parallel_section
from surefoot.parallel.section import ParallelSection


@dataclass(frozen=True, kw_only=True)
class WithContext(ParallelSection):
    """A mesh with one more axis."""

    cp: int | None = 1


MESHES = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"dp_replicate": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_more_axis_of_size_1_changes_no_bit(mesh, place, tmp_path, monkeypatch):
    def work(folder):
        return lambda world: (learn(trainer(world, folder, parallel=mesh), 2), dict(world.axes))

    expected = ranks.run(2, work(tmp_path / "usual"), **mesh)
    names = [*parallel_section.AXES]
    names.insert(place, "cp")
    monkeypatch.setattr(parallel_section, "AXES", tuple(names))
    monkeypatch.setattr(ranks, "ParallelSection", WithContext)
    found = ranks.run(2, work(tmp_path / "with"), **mesh)
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    assert [*found[0][1]] == names
