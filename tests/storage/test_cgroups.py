"""The cores that a process may use are those that its cgroups give it, not those of the machine."""

import os

import pytest
import torch

from source_trees import SRC
from surefoot.model.numerics import limit_threads
from surefoot.storage.cgroups import usable_cores

V2 = "41 31 0:38 / MOUNTS rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / MOUNTS rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
OF_MEMORY = "35 31 0:32 / MOUNTS rw shared:9 - cgroup cgroup rw,memory\n"


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """usable_cores of a machine with 64 cores, whose cgroups have these files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    def cores(cgroup, mounts, **files):
        own, mount = tmp_path / "proc" / "self", tmp_path / "mount"
        own.mkdir(parents=True)
        (own / "cgroup").write_text(cgroup)
        (own / "mountinfo").write_text(mounts.replace("MOUNTS", str(mount)))
        for name, text in files.items():
            path = mount / name.replace("__", "/").replace("-", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return usable_cores(tmp_path / "proc")

    return cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("50000 100000", 1), ("150000 100000", 2), ("800000 100000", 8)],
)
def test_a_quota_of_version_2_counts_and_a_part_of_a_core_is_one(limited, quota, cores):
    assert limited("0::/\n", V2, **{"cpu-max": f"{quota}\n"}) == cores


def test_any_group_above_may_have_the_limit_and_the_least_counts(limited):
    files = {"cpu-max": "400000 100000", "pod__cpu-max": "300000 100000"}
    assert limited("0::/pod/box\n", V2, **files, **{"pod__box__cpu-max": "max 100000"}) == 3


@pytest.mark.parametrize(("quota", "cores"), [("-1", 64), ("200000", 2)])
def test_a_quota_of_version_1_counts(limited, quota, cores):
    files = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000\n"}
    assert limited("4:cpu,cpuacct:/\n", V1, **files) == cores


def test_without_cgroups_or_with_others_all_that_it_is_bound_to_are_usable(limited):
    assert limited("4:memory:/\n", OF_MEMORY, **{"cpu.cfs_quota_us": "1"}) == 64


def test_threads_of_torch_are_no_more_than_that_unless_the_user_says_so(monkeypatch, caplog):
    before = torch.get_num_threads()
    monkeypatch.setattr("surefoot.model.numerics.usable_cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    caplog.set_level("INFO", "surefoot")
    try:
        torch.set_num_threads(3)
        limit_threads()
        assert torch.get_num_threads() == 1
        assert "computing in 1 thread" in caplog.text
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        limit_threads()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_nothing_else_counts_the_cores_of_the_machine():
    counts = ("cpu_count", "sched_getaffinity", "cpu_affinity")
    users = {p.name for p in SRC.rglob("*.py") if any(c in p.read_text() for c in counts)}
    assert users == {"cgroups.py", "env.py"}  # which shows both numbers
