"""The download command: the model and the datasets of a recipe."""

import pytest
from click.testing import CliRunner

from folders import save_recipe
from hub_server import serving
from surefoot.cli.main import main
from surefoot.storage import remote as download


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in download.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving() as (found, url):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
        yield found


def test_a_recipe_runs_offline_after_its_download(hub, tmp_path, monkeypatch):
    pytest.importorskip("modelscope_hub")
    recipe = save_recipe(tmp_path)
    model = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir() if p.is_file()}
    hub.repositories[("models", "owner/tiny")] = model
    change = ["model.path=owner/tiny", "model.hub=modelscope"]
    done = CliRunner().invoke(main, ["download", str(recipe), *change])
    assert done.exit_code == 0, done.output
    place = tmp_path / "ms/models/owner--tiny/snapshots/master"
    assert done.stdout.splitlines()[0] == f"model: {place}"
    assert "sums: " in done.stdout
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = CliRunner().invoke(main, ["preview", str(recipe), *change, "-n", "1"])
    assert done.exit_code == 0, done.output
