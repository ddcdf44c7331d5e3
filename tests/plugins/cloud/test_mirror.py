"""The order of uploads, and what is let go of."""

import logging

import pytest

from checkpoint.sample import sample_states
from damage import flip
from surefoot.checkpoint.saving.preparation import WriterGroup, save
from surefoot.errors import CheckpointError, RunError
from surefoot.plugins.cloud.checkpoints import Contents, run_id
from surefoot.plugins.cloud.lineage import StoredLaunch
from surefoot.plugins.cloud.mirror import Mirror, MirrorOfRanks, Uploader
from surefoot.plugins.cloud.remote_run import STORES
from surefoot.plugins.cloud.store import Store
from surefoot.storage.remote import Address

URL = Address("memory://runs/mirror")


@pytest.fixture
def store(memory):
    return Store(URL, seconds=0)


def saved(folder, step):
    return save(folder, step, sample_states(), writers=WriterGroup("distributed"))


def there(store):
    return list(Contents.of(store).committed)


def test_at_the_end_all_that_lies_here_lies_there(store, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / ".lock").write_text("")
    with Mirror(store, tmp_path) as mirror:
        for step in (1, 2, 3):
            mirror.on_committed(saved(tmp_path, step), replaces=())
    assert there(store) == [1, 2, 3]
    assert mirror.steps == {1, 2, 3}
    assert set(Contents(store.list()).of_the_run) == {"metrics.jsonl"}


def test_what_an_earlier_start_could_not_upload_goes_first(store, tmp_path, caplog):
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2)
    caplog.set_level(logging.INFO)
    with Mirror(store, tmp_path) as mirror:
        assert mirror.protected == {1, 2}  # the one on its way, and the next
    assert there(store) == [1, 2]
    order = [r.getMessage().split()[1] for r in caplog.records if "uploaded" in r.getMessage()]
    assert order == [newest.name, "checkpoint-1"]


def test_what_is_let_go_is_deleted_once_a_newer_one_is_there(store, tmp_path):
    with Mirror(store, tmp_path) as mirror:
        mirror.on_committed(saved(tmp_path, 1), replaces=())
        mirror.finish()
        mirror.on_deleted(["checkpoint-1"])
        mirror.finish()
        assert there(store) == [1]  # it is the newest: there must always be one
        mirror.on_committed(saved(tmp_path, 2), replaces=["checkpoint-1"])
    assert there(store) == [2]
    assert list(store.list("checkpoint-1")) == []


def test_what_was_uploaded_and_let_go_is_not_called_missing(store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Mirror(store, tmp_path) as mirror:
        for step, replaces in [(1, ()), (2, ["checkpoint-1"]), (3, ["checkpoint-1"])]:
            mirror.on_committed(saved(tmp_path, step), replaces)
            mirror.on_poll()  # uploaded
            mirror.on_poll()  # deleted there
    assert 1 not in there(store)
    assert "was not uploaded" not in caplog.text


def test_what_is_about_to_be_dropped_here_is_not_begun(store, tmp_path):
    saved(tmp_path, 1)
    mirror = Mirror(store, tmp_path)
    mirror.on_save(["checkpoint-1"])
    with mirror:
        assert mirror.protected == set()
        mirror.on_deleted(["checkpoint-1"])


def test_a_store_that_fails_is_said_and_tried_again(store, tmp_path, memory, caplog):
    saved(tmp_path, 1)
    memory.pipe_file("/runs/mirror/checkpoint-2", b"a file where a folder must be")
    mirror = Mirror(store, tmp_path, seconds=0)
    why = r"not everything could be uploaded to memory://runs/mirror: .*"
    with pytest.raises(CheckpointError, match=why), mirror:
        mirror.on_committed(saved(tmp_path, 2), replaces=())
    assert "training continues" in caplog.text
    memory.rm_file("/runs/mirror/checkpoint-2")
    with Mirror(store, tmp_path, there=[(step, 1) for step in there(store)]):
        pass
    assert there(store) == [1, 2]


def test_a_damaged_local_checkpoint_is_never_uploaded(store, tmp_path):
    path = saved(tmp_path, 1)
    flip(path / "rank_00000" / "model.safetensors", -9)
    with pytest.raises(CheckpointError, match="it is not uploaded"), Mirror(store, tmp_path):
        pass
    assert there(store) == []


def test_another_error_matters_more_than_an_upload_that_failed(store, tmp_path, memory, caplog):
    memory.pipe_file("/runs/mirror/checkpoint-1", b"")
    with pytest.raises(KeyError), Mirror(store, tmp_path) as mirror:
        mirror.on_committed(saved(tmp_path, 1), replaces=())
        raise KeyError("a bug")
    assert "not everything could be uploaded" in caplog.text


def test_a_user_who_leaves_is_not_kept_waiting(store, tmp_path):
    with pytest.raises(KeyboardInterrupt), Mirror(store, tmp_path) as mirror:
        mirror.on_committed(saved(tmp_path, 1), replaces=())
        raise KeyboardInterrupt


def test_a_run_that_meets_another_stops_and_deletes_nothing(store, tmp_path):
    """Both began before either had stored anything, and so neither knew of the other."""
    first, second = tmp_path / "first", tmp_path / "second"
    with Mirror(store, first) as mirror:
        for step in (1, 2):
            mirror.on_committed(saved(first, step), replaces=())
    (second / "metrics.jsonl").parent.mkdir()
    (second / "metrics.jsonl").write_text("of the second\n")
    before = {name: store.read(name) for name in store.list()}
    why = "another run stores its checkpoints there; nothing of it was replaced or deleted"
    with (
        pytest.raises(CheckpointError, match=why),
        Mirror(store, second, there=[(1, 1), (2, 1)]) as mirror,
    ):
        mirror.on_deleted(["checkpoint-1"])
        mirror.on_committed(saved(second, 3), replaces=["checkpoint-2"])
        mirror.on_poll()
        pytest.fail("it trains on")
    assert {name: store.read(name) for name in store.list()} == before
    assert [path.name for path in second.glob("checkpoint-*")] == ["checkpoint-3"]
    with Mirror(store, first, there=[(1, 1), (2, 1)]) as mirror:  # which has not stopped
        mirror.on_committed(saved(first, 3), replaces=())
    assert there(store) == [1, 2, 3]


def test_a_run_is_known_by_its_id_on_every_machine(store, tmp_path):
    with Mirror(store, tmp_path / "a") as mirror:
        mirror.on_committed(saved(tmp_path / "a", 1), replaces=())
    opened = STORES.open_run(URL, tmp_path / "b", seconds=0)  # as on another machine
    with opened.mirror(opened.newest_sound()) as mirror:
        mirror.on_committed(saved(tmp_path / "b", 2), replaces=())
    assert there(store) == [1, 2]
    assert "checkpoint-2.launch-2/manifest.json" in store.list()
    run_id(tmp_path / "c")  # the copy of another run
    with pytest.raises(RunError, match=r"another run is stored there than .*/c; set another"):
        STORES.open_run(URL, tmp_path / "c", seconds=0)


def test_the_files_of_a_run_are_those_of_the_latest_launch_that_has_sent_all(store, tmp_path):
    launches = {1: StoredLaunch(1), 2: StoredLaunch(2, ((4, 1),)), 3: StoredLaunch(3, ((4, 1),))}
    names = ["checkpoint-4/manifest.json", ".run-id", "recipe.yaml", "metrics.jsonl", "loss.png"]

    def of_the_run(*more):
        return Contents(dict.fromkeys([*names, *more], 1), launches).of_the_run

    first = {name: name for name in ("recipe.yaml", "metrics.jsonl", "loss.png")}
    assert of_the_run() == first
    second = ["launch-2/metrics.jsonl", "launch-2/launches.jsonl"]
    assert of_the_run(*second) == first, "the third continues the first"
    assert of_the_run(*second, "launch-3/metrics.jsonl") == first, "not all are there"
    third = ["launch-3/metrics.jsonl", "launch-3/launches.jsonl"]
    expected = {name.removeprefix("launch-3/"): name for name in third}
    assert of_the_run(*second, *third) == expected
    launches[3] = StoredLaunch(3, ((4, 1), (6, 2)))
    base = "checkpoint-6.launch-2/manifest.json"
    assert of_the_run(*second, base) == {n.removeprefix("launch-2/"): n for n in second}


def test_the_record_is_sent_last_so_that_all_files_are_there(store, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(store, "write", lambda name, data: order.append(name))
    for name in ("launches.jsonl", "zero.txt", "a.txt"):
        (tmp_path / name).write_text("")
    for other in ("checkpoint-9", "launch-4", ".aside"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "file").write_text("")
    Uploader(store, tmp_path, 3).serve(
        {"upload": None, "replace": False, "forget": [], "run_files": True}
    )
    assert sorted(order) == ["launch-3/a.txt", "launch-3/launches.jsonl", "launch-3/zero.txt"]
    assert order[-1] == "launch-3/launches.jsonl"


def test_ranks_that_upload_by_themselves_leave_it_to_the_mirror_to_delete_what_is_void(
    store, tmp_path
):
    store.write("checkpoint-4/manifest.json", b"{}")
    launch = StoredLaunch(2, ((2, 1),))
    store.write(launch.file, launch.dump())
    run_id(tmp_path)
    mirror = MirrorOfRanks(store, tmp_path, there=[(2, 1)], void=[(4, 1)], launch=launch)
    with mirror:
        mirror.on_save(())
        assert "checkpoint-4/manifest.json" in store.list()
        mirror.on_committed(tmp_path / "checkpoint-3", ())
    assert "checkpoint-4/manifest.json" not in store.list()
    assert mirror.steps == {2, 3}
