"""What comes from a store is checked before it is believed, and is here wholly or not at all."""

import pytest

from checkpoint.gridded import gridded
from checkpoint.sample import blank, same, sample_states
from surefoot.checkpoint.disk import strict_json
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import WriterGroup, save
from surefoot.errors import CheckpointError
from surefoot.plugins.cloud.checkpoints import (
    StoredDamageError,
    download,
    list_store,
    remove,
    upload,
    verify,
)
from surefoot.plugins.cloud.store import Store
from surefoot.storage.remote import Address

URL = Address("memory://runs/tiny")


@pytest.fixture(params=["pieces", "rules"])
def store(memory, tmp_path, request):
    made, source = Store(URL), tmp_path / "from"
    if request.param == "rules":
        whole, axes = save(source, 3, sample_states()), {"dp_shard": 2, "tp": 1}
        saved = gridded(whole, tmp_path / "many/checkpoint-3", axes, stage_of=lambda _: 0)
    else:
        saved = save(source, 3, sample_states(), writers=WriterGroup("distributed"))
    upload(made, saved)
    return made


def test_what_was_uploaded_comes_back(store, tmp_path):
    path = download(store, "checkpoint-3", tmp_path / "to")
    fresh = blank(sample_states())
    load(path, fresh)
    assert all(same(fresh[name].state, state.state) for name, state in sample_states().items())
    with pytest.raises(CheckpointError, match="it exists already"):
        download(store, "checkpoint-3", tmp_path / "to")


def test_another_checkpoint_of_its_name_is_never_overwritten(store, tmp_path):
    before = store.read("checkpoint-3/manifest.json")
    other = save(tmp_path / "other", 3, sample_states(5), writers=WriterGroup("distributed"))
    with pytest.raises(CheckpointError, match=r"another checkpoint of this name exists there"):
        upload(store, other)
    assert store.read("checkpoint-3/manifest.json") == before


def test_large_files_come_in_ranges(store, tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.plugins.cloud.checkpoints._RANGE", 100)
    download(store, "checkpoint-3", tmp_path / "to")


def names(store):
    return [name.removeprefix("checkpoint-3/") for name in store.list("checkpoint-3")]


def test_whatever_is_damaged_is_found_and_leaves_nothing_here(store, tmp_path):
    for name in names(store):
        file = f"checkpoint-3/{name}"
        good = store.read(file)
        for bad in (good[:-1], good[:-2] + bytes([good[-2] ^ 1]) + good[-1:], None):
            store.delete(file)
            if bad is not None:
                store.write(file, bad)
            with pytest.raises(StoredDamageError, match="checkpoint-3"):
                download(store, "checkpoint-3", tmp_path / "to")
            assert list((tmp_path / "to").iterdir() if (tmp_path / "to").exists() else []) == []
            assert not verify(store, "checkpoint-3", full=True).ok
        store.write(file, good)
    assert verify(store, "checkpoint-3", full=True).ok


def test_damage_on_the_way_is_mended_by_a_second_look(store, tmp_path, memory, monkeypatch):
    spoilt = []
    cat_file = type(memory).cat_file

    def cat(self, path, start=None, end=None, **options):
        data = cat_file(self, path, start=start, end=end, **options)
        if "model.safetensors" in path and "index" not in path and not spoilt:
            spoilt.append(path)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    monkeypatch.setattr(type(memory), "cat_file", cat)
    download(store, "checkpoint-3", tmp_path / "to")
    assert len(spoilt) == 1


def test_a_manifest_of_no_size_is_not_even_read(store, tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_BYTES", 10)
    with pytest.raises(StoredDamageError, match="too many for a manifest"):
        download(store, "checkpoint-3", tmp_path / "to")
    (line,) = list_store(URL)
    assert "too many" in line.problem


def test_hostile_names_in_a_manifest_lead_nowhere(store, tmp_path):
    text = store.read("checkpoint-3/manifest.json")
    store.write("checkpoint-3/manifest.json", text.replace(b'"state.json"', b'"../../x.js"'))
    with pytest.raises(StoredDamageError):
        download(store, "checkpoint-3", tmp_path / "to" / "deep")
    assert not list(tmp_path.rglob("x.js"))


def test_what_is_removed_is_first_no_checkpoint_any_more(store, memory, monkeypatch):
    deleted = []
    rm_file = type(memory).rm_file

    def spy(self, path):
        deleted.append(path)
        rm_file(self, path)

    monkeypatch.setattr(type(memory), "rm_file", spy)
    remove(store, "checkpoint-3")
    assert deleted[0].endswith("checkpoint-3/manifest.json")
    assert store.list() == {}
