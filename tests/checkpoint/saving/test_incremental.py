"""Files of several processes: linked if all find them equal, otherwise whole or not there."""

import os
import signal
import threading
import traceback

import pytest
import torch

from damage import flip
from surefoot.checkpoint.disk._bytes import describe
from surefoot.checkpoint.disk.commit import clean, committed
from surefoot.checkpoint.disk.manifest import STATE
from surefoot.checkpoint.disk.tensorfile import plan_save
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving import _joint as joint
from surefoot.checkpoint.saving._snapshot_buffer import FileImages, SnapshotBuffer, image_of, places
from surefoot.checkpoint.saving._writer_process import take
from surefoot.checkpoint.saving._writing import Job, Shard, WriteShare, write
from surefoot.checkpoint.saving.preparation import LiveTensors
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box
from surefoot.storage import files

RANKS = 3
STILL = {"a.weight": torch.arange(6000.0).reshape(60, 100), "b.weight": torch.arange(5.0)}
MOVED = {"c.weight": torch.arange(900.0).reshape(9, 100).bfloat16()}


def boxes(rank):
    """Rows of one matrix, columns of another, and a vector that one has alone."""
    found = {
        "a.weight": Box((0, (0, 33, 70)[rank]), (60, (33, 37, 30)[rank])),
        "c.weight": Box((3 * rank, 0), (3, 100)),
    }
    return found | ({"b.weight": Box((0,), (5,))} if rank == 1 else {})


def job(root, rank, step=5, moved=MOVED, **changes):
    """What rank ``rank`` writes of two files."""
    tensors, own = {**STILL, **moved}, boxes(rank)
    described = {name: describe(name, tensor) for name, tensor in tensors.items()}
    plans = plan_save("model", described, None, apart=STILL.keys())
    made = Job(
        root=root,
        step=step,
        kind="full",
        created="2026-01-31T12:34:56Z",
        versions={"surefoot": "0"},
        shards=[
            Shard(
                "model",
                plan,
                WriteShare({n: own[n] for n in plan.header.entries if n in own}, not rank),
            )
            for plan in plans
        ],
        small={STATE: b"{}\n"} if rank == 0 else {},
        rank=rank,
        world_size=RANKS,
        nonce="0badcafe",
        **changes,
    )
    values = {n: tensors[n][box.slices_in(Box.whole(tensors[n].shape))] for n, box in own.items()}
    return made, LiveTensors({"model": values})


def imaged(made, live):
    """The same from an arena, as in the background."""
    starts, size = places([image_of(shard).size for shard in made.shards])
    images = FileImages(SnapshotBuffer.create(size), starts, made.shards)
    take(images, live.groups)
    return made, images


def together(root, prepared=lambda *job: job, ranks=range(RANKS), **options):
    """All processes, as threads: what each saved, or why not."""
    found = {}

    def run(rank):
        try:
            found[rank] = write(*prepared(*job(root, rank, **options)))
        except CheckpointError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def assert_holds(path, tensors):
    assert verify(path, full=True).ok
    source = open_folder(path)
    assert all(torch.equal(read_whole(source, name), t) for name, t in tensors.items())
    assert not list(path.glob(".*"))


@pytest.mark.parametrize("prepared", [lambda *job: job, imaged], ids=["live", "arena"])
def test_rows_and_columns_of_all_are_whole_files(prepared, tmp_path):
    saved = together(tmp_path, prepared)[0]
    assert_holds(saved.path, {**STILL, **MOVED})
    assert sorted(p.name for p in saved.path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_file_that_all_find_equal_is_linked(tmp_path):
    first = together(tmp_path)[0]
    later = {"c.weight": MOVED["c.weight"] + 1}
    found = together(tmp_path, imaged, step=6, moved=later, parent="checkpoint-5")[0]
    assert_holds(found.path, {**STILL, **later})
    assert found.num_shared == (first.path / "model-00001-of-00002.safetensors").stat().st_size


def test_a_file_that_one_finds_changed_is_written(tmp_path, monkeypatch):
    """Even if it is of the first process's opinion that nothing changed."""
    together(tmp_path)
    later = {"c.weight": MOVED["c.weight"].clone()}
    later["c.weight"][8, 99] = 3.0  # the last process's
    found = together(tmp_path, step=6, moved=later, parent="checkpoint-5")[0]
    assert_holds(found.path, {**STILL, **later})


def test_a_bad_sector_in_one_part_is_not_inherited(tmp_path):
    first = together(tmp_path)[0]
    flip(first.path / "model-00001-of-00002.safetensors", -12)
    found = together(tmp_path, step=6, parent="checkpoint-5")[0]
    assert_holds(found.path, {**STILL, **MOVED})
    assert not verify(first.path, full=True).ok


def test_nothing_is_asked_where_nothing_may_be_shared(tmp_path):
    together(tmp_path)
    found = together(tmp_path, step=6, parent="checkpoint-5", share=False)[0]
    assert found.num_shared == 0
    assert_holds(found.path, {**STILL, **MOVED})


class Dying:
    """The functions of ``os``, of which a process makes so many calls and is then no more."""

    def __init__(self, calls):
        self.left = calls

    def __getattr__(self, name):
        known = getattr(os, name)
        if name not in ("open", "pwrite", "fsync", "rename", "posix_fallocate", "mkdir"):
            return known

        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return known(*args, **kwargs)

        return call


def start(root, rank, calls=0):
    """A process of its own, killed before its call number ``calls``."""
    if pid := os.fork():
        return pid
    code = 2
    try:
        files.os = Dying(calls)
        write(*job(root, rank))
        code = 0
    except CheckpointError:
        code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    "calls", [5, 12, pytest.param(None, marks=pytest.mark.proof)], ids=["early", "late", "all"]
)
@pytest.mark.parametrize("rank", range(RANKS))
def test_all_or_nothing_is_there_when_one_dies_wherever_it_is(rank, calls, tmp_path, monkeypatch):
    """One is killed at a call to the operating system; the others end by themselves."""
    monkeypatch.setattr(joint, "_PATIENCE", 1.0)
    for number in [calls] if calls else range(1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        running = [start(root, other, number if other == rank else 0) for other in range(RANKS)]
        ended = [end_of(pid) for pid in running]
        if ended[rank] == 0:  # it had fewer calls
            assert ended == [0] * RANKS
            assert_holds(committed(root)[0], {**STILL, **MOVED})
            return
        assert ended[rank] == -signal.SIGKILL
        assert set(ended[:rank] + ended[rank + 1 :]) <= {0, 1}
        assert rank == 0 or (ended[0] == 0) == bool(committed(root))
        for path in committed(root):  # it died after the rename, or after its report
            assert number > 12
            assert_holds(path, {**STILL, **MOVED})
        clean(root)
        assert [path.name for path in root.iterdir()] == [p.name for p in committed(root)]
    assert calls


def test_the_others_give_up_when_the_first_dies_before_they_may_begin(tmp_path):
    first = start(tmp_path, 0, 5)
    found = together(tmp_path, ranks=(1, 2))
    assert end_of(first) == -signal.SIGKILL
    assert found.keys() == {1, 2}
    assert committed(tmp_path) == []
    (part,) = tmp_path.iterdir()
    for rank in (1, 2):
        assert "rank 0 died or aborted" in (part / f".rank_0000{rank}.json").read_text()
