"""The runs below an address, such as ``s3://bucket/runs``, as folders of their small files.

One listing says what changed; only that is read. The copy is in the user's cache, so that the next
board begins with it. Weights are never read.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...callbacks.launches import NAME as LAUNCHES
from ...callbacks.training_process import LOG
from ...checkpoint.disk.pins import NAME as PINS
from ...errors import RunError, SurefootError, counted
from ...recipe.files import RUN_RECIPE
from ...remote.retry import MissingError
from ...remote.store import Store
from ...storage.address import Address, default_cache
from ...storage.files import write_aside
from ...storage.parallel_work import in_parallel
from .. import run_state
from ..reports.tags import NAME as TAGS
from ..run_folders import MAX_DEPTH, METRICS, RESULTS
from ..run_state import RunState, last_launch, small_json

EVERY = 15.0  # seconds between listings
SECONDS = 20.0  # for which a request is tried again
MAX_BYTES = 1 << 28  # of a file that is copied
_WORKERS = 8
_COPIED = {METRICS, LAUNCHES, RESULTS, RUN_RECIPE, LOG, PINS, TAGS}
_SAMPLES = re.compile(r"(rollouts|generations)-[\w.-]+\.jsonl")
_CHECKPOINT = re.compile(r"checkpoint-\d+(\..*)?")


@dataclass
class StoreRuns:
    """Local copies, below ``folder``, of the small files of all runs below ``address``."""

    address: Address
    folder: Path
    store: Store
    problem: str | None = "the store has not been read yet"
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of each run in the store
    _copied: dict[str, str] = field(default_factory=dict)  # the version of each copy
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Copy what has changed. A store that cannot be read is a ``problem``; copies stay."""
        with self._lock:
            try:
                self.problem = self._refreshed()
            except SurefootError as error:
                self.problem = str(error)
            except OSError as error:
                self.problem = f"{self.folder}: cannot write the copy of the store: {error}"

    def keep_fresh(self, stop: threading.Event) -> None:
        """Refresh now and then, until ``stop`` is set."""
        while not stop.is_set():
            self.refresh()
            stop.wait(EVERY)

    def address_of(self, path: Path) -> Address:
        """The address of a run or of one of its checkpoints, by the path of its copy."""
        name = path.relative_to(self.folder).as_posix()
        return self.address if name == "." else self.address.inside(name)

    def state_of(self, folder: Path) -> RunState:
        """The state of a run: a process of this machine has its lock, or its record says its end;
        otherwise nobody knows here."""
        here = default_cache() / self.address_of(folder).slug
        if run_state.is_locked(here):
            return run_state.state_of(here)
        found, last = last_launch(folder), _last_time(folder)
        state = RunState("unknown", "store", found.launch, found.end, last, found.launch)
        if found.end is not None:
            return replace(state, name=run_state.ended(found.end), evidence="end")
        if found.launch is None and small_json(folder / RESULTS) is not None:
            return replace(state, name="complete", evidence="results")
        return state

    def _refreshed(self) -> str | None:
        there = {n: v for n, v in self.store.versions().items() if _is_safe(n)}
        runs = {n.rpartition("/")[0] for n in there if n.rpartition("/")[2] in (METRICS, LAUNCHES)}
        runs = {run for run in runs if not any(map(_CHECKPOINT.fullmatch, run.split("/")))}
        self.sizes = _sizes(runs, {name: size for name, (size, _) in there.items()})
        wanted: dict[str, str] = {}
        large = 0
        for name, (size, version) in there.items():
            run, _, file = name.rpartition("/")
            if run in runs and (file in _COPIED or _SAMPLES.fullmatch(file)):
                large += size > MAX_BYTES
                wanted |= {name: f"{size} {version}"} if size <= MAX_BYTES else {}
        try:
            self._bring(wanted)
            self._forget(set(self._copied) - wanted.keys())
        finally:
            write_aside(self._index, json.dumps(self._copied).encode())
        said = counted(large, "file is", "files are")
        return f"{said} larger than {MAX_BYTES >> 20} MiB and not shown" if large else None

    def _bring(self, wanted: Mapping[str, str]) -> None:
        def bring(name: str) -> None:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(MissingError):  # deleted since the listing
                write_aside(path, self.store.read(name))
                self._copied[name] = wanted[name]

        is_there = {name for name in wanted if (self.folder / name).is_file()}
        changed = [n for n in wanted if n not in is_there or self._copied.get(n) != wanted[n]]
        in_parallel(bring, sorted(changed), _WORKERS)

    def _forget(self, names: set[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            del self._copied[name]
            for parent in (self.folder / name).parents:
                if parent == self.folder:
                    break
                with contextlib.suppress(OSError):  # not empty
                    parent.rmdir()

    @property
    def _index(self) -> Path:
        return self.folder.with_suffix(".json")


def open_store(address: Address) -> StoreRuns:
    """The runs below ``address``, as they were copied last. Raises ``StoreError``, ``RunError``."""
    folder = default_cache().parent / "board" / address.slug / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot create the folder: {error.strerror}") from None
    found = StoreRuns(address, folder.resolve(), Store(address, seconds=SECONDS))
    known = small_json(found._index) or {}
    found._copied.update((n, v) for n, v in known.items() if isinstance(v, str) and _is_safe(n))
    return found


def _is_safe(name: str) -> bool:
    """Whether the name of an object is that of a file below our folder."""
    parts = name.split("/")
    is_short = len(parts) <= MAX_DEPTH + 2 and all(len(part.encode()) < 200 for part in parts)
    return is_short and "\0" not in name and all(p and not p.startswith(".") for p in parts)


def _sizes(runs: set[str], files: Mapping[str, int]) -> dict[str, int]:
    """The bytes below each run."""
    found = dict.fromkeys(runs, 0)
    for name, size in files.items():
        folder = name.rpartition("/")[0]
        while folder not in found and folder:
            folder = folder.rpartition("/")[0]
        if folder in found:
            found[folder] += size
    return {run or ".": size for run, size in found.items()}


def _last_time(folder: Path) -> Mapping[str, object] | None:
    """When the run last wrote what is in the store, in the place of a heartbeat."""
    lines = run_state.tail(folder / LAUNCHES, run_state.TAIL).splitlines()
    row = (run_state.parsed(lines[-1]) if lines else None) or {}
    since = row.get("time")
    return {"time": since} if isinstance(since, int | float) else None
