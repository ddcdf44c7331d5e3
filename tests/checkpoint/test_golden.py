"""What an earlier version wrote is read by this one: verified, opened, and resumed.

``tests/golden/write_checkpoints.py`` adds the folder of a new version.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

import surefoot
from surefoot.checkpoint.layouts.detection import open_weights
from surefoot.checkpoint.verification import verify
from surefoot.use import open_model

GOLDEN = Path(__file__).parent.parent / "golden"
VERSIONS = sorted(path for path in (GOLDEN / "checkpoints").iterdir() if path.is_dir())
SPEC = importlib.util.spec_from_file_location("write_checkpoints", GOLDEN / "write_checkpoints.py")
MAKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MAKER)
CASES = [(version, name) for version in VERSIONS for name in MAKER.RUNS]
IDS = [f"{version.name}-{name}" for version, name in CASES]


@pytest.fixture(params=CASES, ids=IDS)
def case(request, tmp_path):
    """A project with the interrupted run of a version, and the losses that it must have."""
    version, name = request.param
    for part in ("model", "data"):
        shutil.copytree(version / part, tmp_path / part)
    shutil.copytree(version / name, tmp_path / "old" / f"checkpoint-{MAKER.KEPT}")
    expected = json.loads((version / "losses.json").read_text())[name]
    return tmp_path, name, expected


def test_it_is_verified_opened_and_resumed(case):
    folder, name, expected = case
    checkpoint = folder / "old" / f"checkpoint-{MAKER.KEPT}"
    report = verify(checkpoint, full=True)
    assert report.ok, report.problems
    assert open_weights(checkpoint)
    network = open_model(checkpoint, base=folder / "model" if name == "adapter" else None)
    assert network is not None
    MAKER.recipe_of(folder, name)
    here = {"num_processes": 1, "dp_shard": 1}
    recipe = folder / "recipe.yaml"
    surefoot.train(recipe, parallel=here, **{"checkpoint.resume": str(checkpoint)})
    found = MAKER.losses(folder / "run")
    later = {key: loss for key, loss in expected.items() if int(key.split()[-1]) > MAKER.KEPT}
    assert later
    for key, loss in later.items():
        # other versions of torch, and other machines, round differently
        assert found[key] == pytest.approx(loss, rel=1e-4), key


def test_there_are_golden_checkpoints_of_every_version_of_the_format():
    assert "0.1.0" in {path.name for path in VERSIONS}
    assert sum(path.stat().st_size for path in GOLDEN.rglob("checkpoints/**/*")) < 1_500_000
