"""To add an axis is to name it, and to give it a size: nothing else knows axes by their place."""

import sys

import pytest

import ranks
from each import some
from kept import assert_bitwise, everything
from spread import learn, resume, save, trainer
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.verification import verify
from surefoot.parallel import sharding
from surefoot.parallel.section import ParallelSection

PLACED = [(place, {axis: 2}) for place in (0, 2, 4) for axis in sharding.AXES]


def add_axis(monkeypatch, name, place):
    """Name it among the axes, wherever they are read, and give it a size of 1."""
    names = [*sharding.AXES]
    names.insert(place, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("surefoot.")]:
        if getattr(module, "AXES", None) is sharding.AXES and module is not sharding:
            monkeypatch.setattr(module, "AXES", tuple(names))
    monkeypatch.setattr(sharding, "AXES", tuple(names))
    monkeypatch.setattr(ParallelSection, name, 1, raising=False)
    return names


@pytest.mark.parametrize(("place", "mesh"), some(PLACED, [PLACED[i] for i in (0, 5, 10)]), ids=str)
def test_one_more_axis_of_size_1_changes_no_bit(place, mesh, tmp_path, monkeypatch):
    """It trains, saves and resumes, also a checkpoint that was saved without it."""

    def run(folder, start=None):
        def work(world):
            made = trainer(world, folder, parallel=mesh)
            first = learn(resume(made, start) if start else made, 1)
            path = save(made, folder, "distributed")
            again = resume(trainer(world, folder, parallel=mesh), path)
            return path, first + learn(again, 1), everything(again)

        return ranks.run(2, work, **mesh)

    usual = run(tmp_path / "usual")
    names = add_axis(monkeypatch, "cp", place)
    found = run(tmp_path / "with")
    for (_, losses, weights), (_, expected_losses, expected) in zip(found, usual, strict=True):
        assert losses == expected_losses
        assert_bitwise(weights, expected)
    path = found[0][0]
    assert open_checkpoint(path).manifest.mesh.keys() == {*names}
    assert verify(path, full=True).ok
    from_usual = run(tmp_path / "from", usual[0][0])
    assert [losses[0] for _, losses, _ in from_usual] == [losses[1] for _, losses, _ in usual]
