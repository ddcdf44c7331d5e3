"""List the checkpoints of a run: of Surefoot, and of the Hugging Face Trainer. No torch.

Read from names, manifests and logs; nothing is hashed unless requested.

``plan_pruning`` decides which checkpoints of a run to keep; the others are deleted while nothing
trains (``untrained``). Their files may be hard links to the same data, which counts once.

Runs with URLs are listed by a plugin that reaches their stores (``checkpoint.remote``).
"""

from __future__ import annotations

import contextlib
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError, similar
from ...log import fell_back
from ...storage import files
from ...storage.folder_lock import lock
from ..disk import strict_json
from ..disk.commit import is_being_written, is_leftover, named, step_of
from ..disk.folder import (
    TRAINER_STATE,
    CheckpointFolder,
    TrainerStateFile,
    load_trainer_state,
    metrics_in,
    open_checkpoint,
)
from ..disk.manifest import Manifest
from ..disk.retention import (
    RetentionDecision,
    RetentionPolicy,
    decide,
    drop_all,
    origin_of,
    pinned,
    seconds,
)
from ..layouts import LAYOUTS
from ..layouts.detection import detect_layout, open_weights
from ..layouts.layout import AS_STORED, Layout, Native, Reading, SavedFolder
from ..verification import Progress, verify


@dataclass(frozen=True)
class CheckpointLine:
    """One entry of a run's folder. ``problem`` is set if it cannot be used."""

    path: Path
    step: int | None = None
    created: str | None = None
    layout: str | None = None  # a name in LAYOUTS
    kind: str | None = None  # full or adapter
    parent: str | None = None
    num_bytes: int | None = None  # as its files say
    disk_bytes: int | None = None  # what it adds to the older ones: a shared file counts once
    loss: float | None = None  # the last that was logged
    eval_loss: float | None = None  # at this very step
    is_best: bool = False
    is_being_written: bool = False
    verified: Literal["every byte", "structure"] | None = None
    problem: str | None = None


def list_run(root: Path, reading: Reading = AS_STORED) -> list[CheckpointLine]:
    """The checkpoints of a run, oldest first, then other entries; a checkpoint is a list of one."""
    with files.raising(CheckpointError):
        return _list_run(root, reading)


def verified(
    line: CheckpointLine, progress: Progress | None = None, reading: Reading = AS_STORED
) -> CheckpointLine:
    """The same line, after a check of every byte that has a hash."""
    if line.problem is not None or line.is_being_written:
        return line
    report = verify(line.path, full=True, progress=progress, reading=reading)
    if not report.ok:
        return replace(line, problem=_inside(line.path, report.problems[0]))
    return replace(line, verified="every byte" if has_hashes(line) else "structure")


def _list_run(root: Path, reading: Reading) -> list[CheckpointLine]:
    if step_of(root) >= 0 and detect_layout(root):
        return _with_disk([_line(root)[0]])
    layout = None if named(root) else detect_layout(root)
    if layout is not None and (saves := layout.saves_in(root)):
        return [_of_save(saved, layout, reading) for saved in saves]
    rows = [_line(folder) for folder in named(root)]
    best_steps = (state.best_step for line, state in reversed(rows) if line.problem is None)
    best = next(best_steps, None)  # as the latest that can be read says
    # One chain: equal to the best step, and there is one.
    lines = [replace(line, is_best=line.step == best is not None) for line, _ in rows]
    if (origin := origin_of(root)) is not None:  # whose parent is in another folder
        lines = [replace(x, parent=origin[0]) if x.step == origin[1] else x for x in lines]
    names = files.list_folder(root)
    return _with_disk(lines) + [_leftover(root / name) for name in names if is_leftover(name)]


def _with_disk(lines: list[CheckpointLine]) -> list[CheckpointLine]:
    totals = added([stored(line.path) for line in lines])
    return [replace(line, disk_bytes=n) for line, n in zip(lines, totals, strict=True)]


def _line(folder: Path) -> tuple[CheckpointLine, TrainerStateFile]:
    """A checkpoint, and its information about the run."""
    layout = detect_layout(folder)
    has_log = files.exists(folder / TRAINER_STATE)
    is_foreign = has_log if layout is None else not layout.has_manifest
    try:
        return _of_trainer(folder, layout) if is_foreign else _of_surefoot(folder)
    except CheckpointError as error:
        problem = _inside(folder, str(error))
        return CheckpointLine(
            folder, step_of(folder), layout=_name(layout), problem=problem
        ), TrainerStateFile()


def _name(layout: Layout | None) -> str | None:
    return None if layout is None else layout.name


def has_hashes(line: CheckpointLine) -> bool:
    """Whether it is a Surefoot checkpoint, whose manifest has a hash of every byte."""
    return line.layout is not None and LAYOUTS[line.layout].has_manifest


def _inside(folder: Path, problem: str) -> str:
    """The problem, without the name of the folder with which it begins."""
    return problem.removeprefix(str(folder)).removeprefix(": ").removeprefix("/")


def _of_surefoot(folder: Path) -> tuple[CheckpointLine, TrainerStateFile]:
    checkpoint = open_checkpoint(folder)
    state = state_of(checkpoint)
    return line_of(folder, checkpoint.manifest, state, _wrong_length(checkpoint)), state


def line_of(
    folder: Path, manifest: Manifest, state: TrainerStateFile, problem: str | None
) -> CheckpointLine:
    """The line of a Surefoot checkpoint."""
    return CheckpointLine(
        folder,
        step=manifest.step,
        created=manifest.created,
        layout=Native.name,
        kind=manifest.kind,
        parent=manifest.parent,
        num_bytes=sum(manifest.files.values()),
        loss=state.last("loss"),
        eval_loss=state.at("eval_loss", manifest.step),
        problem=problem,
    )


def _of_trainer(folder: Path, layout: Layout | None) -> tuple[CheckpointLine, TrainerStateFile]:
    """A folder without a manifest: its weights must be readable, its log need not be."""
    open_weights(folder)
    try:
        state = TrainerStateFile.of(load_trainer_state(folder))
    except CheckpointError:
        state = TrainerStateFile()
    step = step_of(folder) if state.step is None else state.step
    line = CheckpointLine(
        folder,
        step=step,
        created=_modified(folder),
        layout=_name(layout),
        kind="adapter" if layout is not None and layout.is_adapter else "full",
        num_bytes=sum(name.num_bytes for name in stored(folder)),
        loss=state.last("loss"),
        eval_loss=state.at("eval_loss", step),
    )
    return line, state


def _of_save(saved: SavedFolder, layout: Layout, reading: Reading) -> CheckpointLine:
    """One save of a folder that contains several."""
    line = CheckpointLine(
        saved.path,
        step=saved.step,
        created=_modified(saved.path),
        layout=layout.name,
        kind="full",
        num_bytes=saved.num_bytes,
    )
    try:
        open_weights(saved.path, reading)
    except CheckpointError as error:
        return replace(line, problem=_inside(saved.path, str(error)))
    return line


def _modified(folder: Path) -> str | None:
    """When the folder of another tool was last written to, in the form of manifests."""
    names = [folder / TRAINER_STATE, folder]
    with files.raising(CheckpointError):
        stamp = next(path for path in names if files.exists(path)).stat().st_mtime
    try:
        modified = datetime.fromtimestamp(stamp, UTC)
    except (ValueError, OverflowError):  # no year of ours
        return None
    return modified.isoformat(timespec="seconds").replace("+00:00", "Z")


def _leftover(folder: Path) -> CheckpointLine:
    if is_being_written(folder):
        return CheckpointLine(folder, is_being_written=True)
    return CheckpointLine(
        folder, problem="an interrupted save or deletion; deleted when the run resumes"
    )


def _wrong_length(checkpoint: CheckpointFolder) -> str | None:
    for name, expected in checkpoint.manifest.files.items():
        size = files.size_of(checkpoint.path / name)
        if size != expected:
            return f"{name}: {'missing' if size is None else f'{size} of {expected} bytes'}"
    return None


def state_of(checkpoint: CheckpointFolder) -> TrainerStateFile:
    """The log of a Surefoot checkpoint; empty if it is missing or damaged."""
    name = TRAINER_STATE
    if name not in checkpoint.manifest.files:
        return TrainerStateFile()
    try:
        return TrainerStateFile.of(strict_json.parse_object(checkpoint.small(name), name))
    except CheckpointError:
        return TrainerStateFile()


@dataclass(frozen=True)
class PruneOptions:
    """The retention policy, and the metric of the best checkpoints."""

    rule: RetentionPolicy
    metric: str
    greater: bool | None  # None: nobody says whether greater values are better
    resume: str = "auto"


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A complete checkpoint, its metric, and whether it is kept."""

    line: CheckpointLine
    metric: float | None
    verdict: RetentionDecision


@dataclass(frozen=True)
class PrunePlan:
    """The decision about each checkpoint of a run."""

    checkpoints: Sequence[PlannedCheckpoint]
    freed_bytes: int  # on the disk, if those that go are removed

    @property
    def removable(self) -> Sequence[PlannedCheckpoint]:
        """Those to delete."""
        return [each for each in self.checkpoints if not each.verdict.stays]

    def remove(self) -> None:
        """Delete them."""
        drop_all([each.line.path for each in self.removable])


@contextmanager
def untrained(folder: Path) -> Iterator[None]:
    """Hold the run's lock, like a training process; ``CheckpointError`` if one has it."""
    run_lock = lock(
        folder,
        CheckpointError,
        doing="cannot lock the run's folder",
        taken=f"{folder}: a process is training there, and deletes old checkpoints itself; "
        "stop it first, or add --dry-run",
    )
    with run_lock:
        if not run_lock.is_real:
            fell_back(
                f"{folder} is pruned without its lock",
                "this file system has none",
                "does not notice a process that trains there; prune only when none does",
            )
        if saving := [line for line in list_run(folder) if line.is_being_written]:
            raise CheckpointError(
                f"{saving[0].path}: a checkpoint is still being saved, by the writer process of "
                "a run that ended; try again when it is done"
            )
        yield


def plan_pruning(folder: Path, options: PruneOptions) -> PrunePlan:
    """Decide about each complete Surefoot checkpoint of a run, which must have one."""
    if step_of(folder.resolve()) >= 0:
        raise CheckpointError(f"{folder}: it is a checkpoint; name the folder of its run")
    lines = {
        step_of(line.path): line  # by name, as a run finds the newest
        for line in list_run(folder)
        if has_hashes(line) and line.problem is None and not line.is_being_written
    }
    if not lines:
        raise CheckpointError(f"{folder}: it contains no complete Surefoot checkpoint to prune")
    metrics = _metrics(list(lines.values()), options)
    resume = Path(options.resume).resolve()
    pins = pinned(folder)
    protected = [
        step
        for step, line in lines.items()
        if line.is_best or step in pins or line.path.resolve() == resume
    ]
    verdicts = decide(
        {step: seconds(line.created) for step, line in lines.items()},
        options.rule,
        now=time.time(),
        metrics=metrics,
        greater=bool(options.greater),
        protected=protected,
    )
    planned = [
        PlannedCheckpoint(lines[v.step], metrics.get(v.step), _with_reason(lines[v.step], v, pins))
        for v in verdicts
    ]
    deleted = [item.line.path for item in planned if not item.verdict.stays]
    usages = [stored(path) for path in deleted if not path.is_symlink()]
    return PrunePlan(planned, freed(usages))


def _with_reason(
    line: CheckpointLine, verdict: RetentionDecision, pins: Collection[int]
) -> RetentionDecision:
    """The same decision, with the reason why it is protected."""
    name = "pinned" if verdict.step in pins else "checkpoint.resume names it"
    name = "best" if line.is_best else name
    why = [name if reason == "protected" else reason for reason in verdict.why]
    return RetentionDecision(verdict.step, tuple(dict.fromkeys(why)))


def _metrics(lines: Sequence[CheckpointLine], options: PruneOptions) -> dict[int, float]:
    """The metric by step, from the logs of all checkpoints; the latest has precedence."""
    history = [row for line in lines for row in state_of(open_checkpoint(line.path)).history]
    metrics = metrics_in(history, options.metric)
    if not metrics and options.rule.keep_best and history:
        logged_names = sorted({str(key) for row in history if isinstance(row, dict) for key in row})
        near = similar(options.metric, logged_names)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(logged_names)}"
        raise CheckpointError(f"--metric: {options.metric!r} was never logged; {hint}")
    if metrics and options.greater is None:
        raise CheckpointError(
            f"--metric: whether greater values of {options.metric} are better is not known; add "
            "--greater or --smaller"
        )
    return metrics


_SECTOR = 512  # bytes; the unit of st_blocks on every system


@dataclass(frozen=True)
class DiskUsage:
    """A file on disk: its inode, its number of hard links, and its blocks in bytes."""

    inode: tuple[int, int]  # device, number
    num_names: int
    num_bytes: int  # its length
    disk_bytes: int  # the blocks it takes


def stored(folder: Path) -> list[DiskUsage]:
    """Every name of a file below ``folder``, links not followed.

    Files that disappear meanwhile, or cannot be read, are skipped. Clones (of Btrfs or XFS) count
    as separate files: no system call reports what they share.
    """
    usages, pending = [], [folder]
    while pending:  # no recursion: folders may be nested deeper than Python's stack
        with contextlib.suppress(OSError):
            for path in sorted(pending.pop().iterdir()):
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(path)
                    elif stat.S_ISREG(status.st_mode):
                        inode, blocks = (status.st_dev, status.st_ino), status.st_blocks * _SECTOR
                        usages.append(DiskUsage(inode, status.st_nlink, status.st_size, blocks))
    return usages


def added(folders: Iterable[Sequence[DiskUsage]]) -> list[int]:
    """Bytes on the disk that each folder adds to those before it: a shared file counts once."""
    seen: set[tuple[int, int]] = set()
    totals = []
    for names in folders:
        new = {name.inode: name.disk_bytes for name in names if name.inode not in seen}
        seen |= new.keys()
        totals.append(sum(new.values()))
    return totals


def freed(folders: Iterable[Sequence[DiskUsage]]) -> int:
    """Bytes that are freed if all ``folders`` are deleted: without hard links elsewhere."""
    names = [name for folder in folders for name in folder]
    counts = Counter(name.inode for name in names)
    last = {name.inode: name.disk_bytes for name in names if counts[name.inode] >= name.num_names}
    return sum(last.values())
