"""Free memory is what the tightest cgroup above this process leaves, whatever its version; short
collections leave no garbage behind, and undo nothing that the program has done."""

import gc
import weakref

import pytest

from surefoot.storage.memory import free_memory, only_new_collected

GIB = 1 << 30
V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
UNLIMITED = {V2: "max", V1: 9223372036854771712}


class Machine:
    """A /proc and a cgroup file system in a folder; 64 GiB are free."""

    def __init__(self, folder):
        self.proc, self.mounts = folder / "proc", folder / "sys fs"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
        self.place("", "")

    def place(self, cgroup, mountinfo):
        mounts = str(self.mounts).replace(" ", "\\040")
        (self.proc / "self" / "cgroup").write_text(cgroup)
        (self.proc / "self" / "mountinfo").write_text(mountinfo.replace("MOUNTS", mounts))

    def group(self, path, version, limit, used, cached=0):
        folder = self.mounts / path
        folder.mkdir(parents=True, exist_ok=True)
        limit_name, used_name, prefix = version
        limit = UNLIMITED[version] if limit is None else limit
        (folder / limit_name).write_text(f"{limit}\n")
        (folder / used_name).write_text(f"{used}\n")
        stat = f"anon 5\n{prefix}active_file {cached}\n{prefix}inactive_file 0\n"
        (folder / "memory.stat").write_text(stat)

    @property
    def free(self):
        return free_memory(self.proc)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


ONE = "35 31 0:32 {} MOUNTS/memory rw shared:9 - cgroup cgroup rw,memory\n"
TWO = "41 31 0:38 {} MOUNTS rw - cgroup2 cgroup2 rw,nsdelegate\n"


def test_without_cgroups_it_is_that_of_the_machine(machine):
    assert machine.free == 64 * GIB


def test_a_container_sees_its_limit_at_the_mount_itself(machine):
    machine.place("0::/\n", TWO.format("/"))
    machine.group("", V2, 8 * GIB, 5 * GIB, cached=GIB)
    assert machine.free == 4 * GIB


@pytest.mark.parametrize("limited", ["job_7/step_0", "job_7", "."])
def test_any_folder_above_a_nested_group_may_have_the_limit(limited, machine):
    machine.place("0::/job_7/step_0\n", TWO.format("/"))
    for path in ("job_7/step_0", "job_7", "."):
        machine.group(path, V2, 3 * GIB if path == limited else None, 2 * GIB)
    assert machine.free == GIB


def test_the_least_of_several_limits_counts(machine):
    machine.place("0::/job/step\n", TWO.format("/"))
    machine.group("job/step", V2, 9 * GIB, GIB)
    machine.group("job", V2, 4 * GIB, 2 * GIB)
    assert machine.free == 2 * GIB


def test_memory_that_is_throttled_is_not_free(machine):
    machine.place("0::/\n", TWO.format("/"))
    machine.group("", V2, 8 * GIB, GIB)
    (machine.mounts / "memory.high").write_text(f"{2 * GIB}\n")
    assert machine.free == GIB


def test_a_mount_without_a_source_is_no_obstacle(machine):
    machine.place("0::/\n", "40 31 0:37 / /x rw - fuse.x  rw\n" + TWO.format("/"))
    machine.group("", V2, 2 * GIB, GIB)
    assert machine.free == GIB


def test_a_group_beyond_its_limit_has_nothing_free(machine):
    machine.place("0::/\n", TWO.format("/"))
    machine.group("", V2, 2 * GIB, 3 * GIB)
    assert machine.free == 0


def test_limits_of_version_1_are_seen_beside_an_empty_version_2(machine):
    lines = "4:cpu,memory:/slurm/job_7\n3:cpuset:/\n0::/\n"
    machine.place(lines, TWO.format("/") + ONE.format("/"))
    machine.group("memory/slurm/job_7", V1, None, GIB)
    machine.group("memory/slurm", V1, 3 * GIB, 2 * GIB, cached=GIB)
    machine.group("memory", V1, None, GIB)
    assert machine.free == 2 * GIB


@pytest.mark.parametrize(
    ("path", "root"), [("/docker/a", "/docker/a"), ("/../elsewhere", "/"), ("/host/x", "/docker/a")]
)
def test_a_mount_shows_a_part_of_the_tree_only(path, root, machine):
    machine.place(f"4:memory:{path}\n", ONE.format(root))
    machine.group("memory", V1, 3 * GIB, 2 * GIB)
    assert machine.free == GIB


def test_what_it_says_of_this_machine_is_plausible():
    assert free_memory() > 1 << 20


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self):
        self.ring = self


def test_a_collection_inside_walks_only_what_was_made_inside(request):
    if gc.get_freeze_count():  # the process of these tests has set its modules aside
        request.addfinalizer(gc.freeze)
        gc.unfreeze()
    old = weakref.ref(Ring())
    with only_new_collected():
        new = weakref.ref(Ring())
        with only_new_collected():
            gc.collect()
        assert (old() is None, new() is None) == (False, True)
        gc.collect()
        assert old() is not None  # what is nested does not end it
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_has_set_aside_stay_so():
    gc.freeze()
    try:
        with pytest.raises(KeyError), only_new_collected():
            raise KeyError
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
