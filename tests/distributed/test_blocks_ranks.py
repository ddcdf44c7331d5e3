"""Methods that train layers in turn, on several ranks: as one rank does, and from mesh to mesh."""

import pytest

import ranks
from kept import assert_bitwise, go_on, start
from spread import CLOSE, learn, trainer
from surefoot.methods import LISA, BAdam, BAdamRatio
from surefoot.parallel.world import ALONE

SAVED, STEPS = 3, 5  # in the middle of the second turn, and in the third one
SETTINGS = {
    "badam": {"method": BAdam(switch_interval=2)},
    "lisa": {"method": LISA(switch_interval=2, num_layers=1), "packing": True, "recompute": True},
    "all": {"method": BAdam(switch_interval=2, embeddings_and_head=True), "kind": "qwen2"},
    "ratio": {"method": BAdamRatio(switch_interval=2, update_ratio=0.25)},
    "scatter": {
        "method": BAdamRatio(
            switch_interval=2, update_ratio=0.25, mask="scatter", embeddings_and_head=True
        ),
        "kind": "qwen2",
        "recompute": True,
    },
}
MESHES = [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2, "dp_shard": 1}]
FEW = [
    ("badam", MESHES[1]),
]
NOT_BY_TP = ("ratio", "scatter")
MANY = [
    (name, mesh)
    for name in SETTINGS
    for mesh in MESHES
    if (name, mesh) not in FEW and not (name in NOT_BY_TP and "tp" in mesh)
]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.proof) for case in MANY)]


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    """What one rank does: its settings, its losses, and a checkpoint inside a turn."""
    folder, settings = tmp_path_factory.mktemp("alone"), SETTINGS[request.param]
    losses = learn(trainer(ALONE, folder, **settings), STEPS)
    path, expected, first = start(ALONE, folder, SAVED, **settings)
    assert first == losses[:SAVED]
    return request.param, losses, path, expected


@pytest.mark.parametrize(("alone", "parallel"), CASES, indirect=["alone"], ids=str)
def test_a_run_goes_from_one_rank_to_several_inside_a_turn_and_back(alone, parallel, tmp_path):
    name, losses, path, expected = alone
    settings = SETTINGS[name]

    def work(world):
        _, found, more = go_on(world, tmp_path / "more", path, STEPS - SAVED, **settings)
        saved, there, first = start(world, tmp_path / "whole", SAVED, **settings)
        _, again, rest = go_on(world, tmp_path / "rest", saved, STEPS - SAVED, **settings)
        return found, more, saved, there, again, first, rest

    parts = ranks.run(2, work, **parallel)
    found, more, saved, there, again, first, rest = parts[0]
    assert_bitwise(found, expected)
    assert_bitwise(again, there)
    _, here, back = go_on(ALONE, tmp_path / "back", saved, STEPS - SAVED, **settings)
    assert_bitwise(here, there)
    for ours in ([*losses[:SAVED], *more], [*first, *rest], [*first, *back]):
        for step, (one, other) in enumerate(zip(ours, losses, strict=True)):
            assert one == pytest.approx(other, abs=2 * CLOSE, rel=2 * CLOSE), f"step {step}"


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_entries_of_sharded_rows_and_of_stages_are_refused(mesh, tmp_path):
    match = {"tp": r"parallel\.tp: .* rows of .* are sharded", "pp": r"parallel\.pp: the method"}
    with pytest.raises(AssertionError, match=match[next(iter(mesh))]):
        ranks.run(
            2, lambda world: trainer(world, tmp_path, **SETTINGS["ratio"], parallel=mesh), **mesh
        )
