"""Limits of this process that a container, a queue or a service sets: the folders of its cgroups,
and the cores that it may use.

A limit may be set on any folder between the process's own cgroup and the root, in version 1 or 2,
and the least counts. The paths are those that the kernel names in ``/proc/self``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")


def usable_cores(proc: Path = PROC) -> int:
    """How many cores this process may use at once, at least 1: those that it is bound to, within
    the processor time that its cgroups get (``docker run --cpus``, limits of Kubernetes). Part of
    a core counts as one. The number of the machine is no measure: with half a core, two threads
    trained 1,990 tokens a second, and one 2,900."""
    is_linux = hasattr(os, "sched_getaffinity")
    bound = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    quotas = (_quota(folder, kind) for folder, kind in groups("cpu", proc))
    return max(1, min([bound, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def _quota(folder: Path, kind: str) -> float | None:
    """The cores of a cgroup; None if it has no limit: ``max``, or -1 in version 1."""
    if kind == "cgroup2":
        words = [word for line in lines(folder / "cpu.max") for word in line.split()]
    else:
        words = lines(folder / "cpu.cfs_quota_us") + lines(folder / "cpu.cfs_period_us")
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def groups(controller: str, proc: Path = PROC) -> Iterator[tuple[Path, str]]:
    """The folders of the cgroups in which ``controller`` (``memory``, ``cpu``) limits this process,
    from its own one up to the mount; and of which version: ``cgroup2`` or ``cgroup``."""
    paths = dict(_paths(controller, proc))
    for line in lines(proc / "self" / "mountinfo"):
        # The mark between fields whose number varies and those that follow (proc_pid_mountinfo(5)).
        before, _, after = line.partition(" - ")
        _, _, _, root, mount, *_ = before.split()
        kind, *_, options = after.split()  # between them the source, which may be empty
        if kind != "cgroup2" and (kind != "cgroup" or controller not in options.split(",")):
            continue
        for inside in _upwards(paths.get(kind, "/"), _unescaped(root)):
            yield Path(_unescaped(mount)) / inside, kind


def _paths(controller: str, proc: Path) -> Iterator[tuple[str, str]]:
    """The path of this process's cgroup with ``controller``, by the kind of file system."""
    for line in lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        # Version 2 has the number 0 and no controllers; a system may have both versions mounted.
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif controller in controllers.split(","):
            yield "cgroup", path


def _upwards(path: str, root: str) -> list[PurePosixPath]:
    """``path`` relative to the ``root`` of a mount, and all folders above it within the mount. A
    container may see a path outside of its mount: the mount itself remains."""
    folder = PurePosixPath(path)
    if ".." in folder.parts or not folder.is_relative_to(root):
        return [PurePosixPath()]
    inside = folder.relative_to(root)
    return [inside, *inside.parents]


def _unescaped(text: str) -> str:
    """A path of mountinfo, in which a space is ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def lines(path: Path) -> list[str]:
    """The lines of a file of the kernel; none if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
