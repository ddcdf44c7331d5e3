"""A hub id means what a folder of the same content means: a model, a checkpoint, a run, adapters.

The hub is its own cache on this disk, as a download leaves it: links into a folder of blobs, and
only the files that were asked for.
"""

import shutil

import pytest

import surefoot
from damage import flip
from folders import save_adapter, save_model, save_recipe
from surefoot.errors import CheckpointError, ModelError
from surefoot.plugins.cloud import hubs as huggingface
from surefoot.use import locate, open_model

COMMIT = "0" * 39 + "1"
NEVER = ("optimizer.safetensors", "state.json")  # not asked for


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A finished LoRA run with checkpoints 2 and 4, its base, and two adapters."""
    folder = tmp_path_factory.mktemp("project")
    recipe = save_recipe(folder, method={"lora": {"rank": 2}}, generate={"max_new_tokens": 7})
    surefoot.train(recipe)
    save_model(folder / "plain")
    for name in ("first", "second"):
        save_adapter(folder / "plain", folder / "adapters" / name)
    return folder


@pytest.fixture
def upload(tmp_path, monkeypatch):
    """Put a folder into the cache of the hub, under a name; downloads find it there, offline."""

    def put(source, name):
        place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(COMMIT)
        (place / "blobs").mkdir()
        for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
            if path.name in NEVER or path.name.startswith("."):
                continue
            shutil.copy(path, place / "blobs" / str(number))
            link = place / "snapshots" / COMMIT / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(place / "blobs" / str(number))
        return place

    own = huggingface.snapshot_download

    def offline(name, **options):
        return own(name, cache_dir=tmp_path / "hub", local_files_only=True, **options)

    monkeypatch.setattr(huggingface, "snapshot_download", offline)
    return put


def test_a_model_a_checkpoint_and_a_run_of_a_hub(project, upload):
    upload(project / "plain", "me/plain")
    upload(project / "run" / "checkpoint-4", "me/checkpoint")
    upload(project / "run", "me/run")
    assert not locate("me/plain").is_adapter
    found = locate("me/checkpoint")
    assert found.is_adapter
    assert found.recipe.generate.max_new_tokens == 7
    assert locate("me/run").folder.name == "checkpoint-4"
    assert locate("me/run/checkpoint-2").folder.name == "checkpoint-2"
    for name in ("me/plain", "me/checkpoint", "me/run"):
        assert open_model(name).folder == locate(name).folder


def test_a_damaged_file_of_a_hub_is_an_error(project, upload):
    place = upload(project / "run" / "checkpoint-4", "me/checkpoint")
    flip(place / "snapshots" / COMMIT / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        open_model("me/checkpoint")


def test_of_several_adapters_one_is_named(project, upload, tmp_path):
    upload(project / "adapters", "me/adapters")
    for path in ("me/adapters", project / "adapters"):
        with pytest.raises((ModelError, CheckpointError), match=r"adapters.*first.*second"):
            locate(path)
        assert locate(f"{path}/second").is_adapter


def test_a_folder_that_the_hub_model_lacks_is_named(project, upload):
    upload(project / "plain", "me/plain")
    with pytest.raises(ModelError, match="me/plain has no folder 'more'"):
        locate("me/plain/more")
