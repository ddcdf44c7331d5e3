"""The folder of a run: one run, one process at a time, and the checkpoint it resumes from."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import schema
from ..checkpoint.disk.commit import clean, committed, named, new_nonce, step_of
from ..checkpoint.layouts.detection import has_manifest, names_save
from ..checkpoint.remote import RemoteRun, stores
from ..checkpoint.saving.apart import wait_for_uploads
from ..checkpoint.saving.listeners import RunMirror
from ..checkpoint.section import CheckpointSection
from ..checkpoint.verification import (
    expect_valid,
    find_latest,
    recover_latest,
    refuse_foreign,
    set_aside,
    wait_for_orphans,
)
from ..data.order.micro_batches import fitting_micro_batch
from ..errors import CheckpointError, RecipeError, RunError, SurefootError, explain
from ..extensions import Extended
from ..log import fell_back
from ..parallel.section import launched
from ..parallel.world import ALONE, World
from ..recipe.comparison import changes_in, refuse_in_own, say
from ..recipe.files import RUN_RECIPE, is_run
from ..recipe.recipe import MemorySettings, Recipe, load
from ..storage.child import LAUNCHER
from ..storage.files import (
    NO_LOCKS,
    digest,
    is_folder,
    make_folder,
    raising,
    size_of,
    try_writes,
    write_aside,
    write_new,
)
from ..storage.folder_lock import lock
from ..storage.remote import Address, is_address
from ..training.callback import TrainerCallback
from ..training.callbacks.launches import forget_stop_request, is_alive, last_heartbeat
from ..training.section import TrainSection
from .apart import refuse_apart

logger = logging.getLogger(__name__)
MemoryChoice = Callable[[Recipe, World], MemorySettings]  # for the ranks that train a recipe
_FROM_SCRATCH = "set checkpoint.resume=none, which renames these checkpoints"
_HANDOVER = 1800.0  # seconds for the last save of the launch before, to a slow network disk
_LAST_STEP = 10.0  # seconds; heartbeats then show whether a process of short steps still trains
_LOOK = 1.0  # seconds between two looks at a heartbeat
_SIGHT = 20.0  # seconds for a network disk to show a file to another machine
_GLANCE = 3.0  # the same where a run can do without


class RunUploads(TrainerCallback, AbstractContextManager["RunUploads"]):
    """Uploads a run to a hub while it trains; it leaves no process behind."""

    @abstractmethod
    def finish(self, *, is_complete: bool) -> None:
        """The run has ended: upload its result and wait for it, unless the run was stopped."""


_UPLOADS: Extended[Callable[[TrainSection], RunUploads]] = Extended("uploads", {})


def uploads_of(section: TrainSection) -> RunUploads | None:
    """The uploads to a hub that a recipe asks for."""
    return None if section.push_to_hub is None else _UPLOADS["huggingface"](section)


@dataclass(frozen=True)
class RunFolder:
    """The local folder of a run, and its part in an object store."""

    path: Path
    away: RemoteRun | None = None  # of a run whose output_dir is a URL; on rank 0
    is_apart: bool = False  # whether ``path`` is another folder on each machine


@contextmanager
def opened(recipe: Recipe, world: World = ALONE) -> Iterator[RunFolder]:
    """The run's folder, created if needed, locked by rank 0 against a second run inside the block.
    Raises ``RunError`` if it cannot be written, another process trains in it, it contains another
    run, or not all ranks see it, and have no store in common in which this run can be saved, and
    ``StoreError`` if ``output_dir`` is a URL that cannot be used."""
    folder, place = recipe.train.folder, recipe.train.output_dir
    is_cache = isinstance(place, Address)
    with world.together():
        if world.is_main or (is_cache and world.is_local_main):
            _must_take_writes(folder, is_cache=is_cache, shares=recipe.checkpoint.share_unchanged)
    with _locked(folder) if world.is_main else nullcontext():
        run = RunFolder(folder, is_apart=not _is_shared(folder, world, is_cache=is_cache))
        if run.is_apart:
            refuse_apart(recipe.train, recipe.checkpoint, recipe.stage)
            if world.is_local_main:
                wait_for_uploads(folder)
            world.wait()
        if world.is_main:
            forget_stop_request(folder)
            wait_for_orphans(folder)
            if isinstance(place, Address):
                seconds = recipe.checkpoint.remote_seconds
                away = stores().open_run(place, folder, seconds=seconds, is_apart=run.is_apart)
                run = replace(run, away=away)
            _refuse_another_run(run, recipe)
        world.wait()
        yield run


def _must_take_writes(folder: Path, *, is_cache: bool, shares: bool) -> None:
    """Refuse a bucket that is mounted as a folder to which a file can only be streamed,
    before the model is loaded. Appends to metrics and launches would be lost there silently,
    and the first save would fail."""
    try:
        make_folder(folder)
        if not try_writes(folder) and shares:
            what = "checkpoint.share_unchanged: every checkpoint has all its files for itself"
            why = f"the disk of {folder} has neither clones nor hard links"
            fell_back(what, why, "takes more disk, and more time to save", logging.INFO)
    except OSError as error:
        if error.errno not in (errno.ESPIPE, *NO_LOCKS):
            raise RunError(
                f"train.output_dir: cannot write in {folder}: {explain(error)}"
            ) from None
        cure = "train.output_dir to the URL of the bucket (s3://..., gs://...), or to"
        raise RunError(
            f"train.output_dir: {folder} is on a file system that cannot overwrite, append to and "
            f"rename files ({error.strerror}), such as a bucket that is mounted without a cache; "
            f"set {'train.cache_dir to' if is_cache else cure} a folder on a disk"
        ) from None


@dataclass
class _Predecessor:
    """The process that has the lock of ``folder``, where a launcher has started this one: it may be
    the launch before, which got a signal and still saves."""

    folder: Path
    began: float = field(default_factory=time.monotonic)
    step: int | None = None  # once it has had the time to finish its step
    is_announced: bool = False

    def is_leaving(self) -> bool:
        """Whether it may be leaving; waits a moment if so. It is not if it still takes steps, or
        its process is dead, so that the lock is another one's."""
        beat = last_heartbeat(self.folder)
        seconds, step = time.monotonic() - self.began, beat.get("step")
        # Surefoot's own launcher waits for all ranks before it starts them again.
        is_restarted = launched() is not None and LAUNCHER not in os.environ
        if not (is_restarted and isinstance(step, int)) or is_alive(beat) is False:
            return False
        if seconds > _HANDOVER:
            return False
        if self.step is None and seconds > _LAST_STEP:
            self.step = step
        if self.step is not None and step > self.step + 1:
            return False
        if not self.is_announced:
            self.is_announced = True
            logger.warning(
                "process %s on %s has the lock of %s: waiting for up to %g minutes while it saves",
                *(beat.get("pid"), beat.get("host"), self.folder, _HANDOVER / 60),
            )
        time.sleep(_LOOK)
        return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder_lock = lock(  # a dead process holds none
        folder,
        RunError,
        doing=f"train.output_dir: cannot lock {folder}",
        taken=f"train.output_dir: another process is training in {folder}, or saves to it; "
        "stop it or choose another folder",
        waits=_Predecessor(folder).is_leaving,
    )
    with folder_lock:
        if not folder_lock.is_real:
            cost = "does not notice a second process that trains in it; start only one"
            fell_back(f"{folder} is not locked", "this file system has no locks", cost)
        yield


def _is_shared(folder: Path, world: World, *, is_cache: bool) -> bool:
    """Whether all ranks see each other's files in the folder. If not, it must be the cache of a run
    in a store, to which each rank can upload its part of every checkpoint."""
    if world.size == 1:
        return True
    # On machines without a common disk, the first save would wait ten minutes for the parts of the
    # others, and fail.
    mark = folder / f".seen.{world.from_main(new_nonce())}"
    if world.is_main:
        with raising(RunError, f"train.output_dir: cannot write in {folder}"):
            write_new(mark, b"")
    world.wait()
    deadline = time.monotonic() + (_GLANCE if is_cache else _SIGHT)
    while not (is_seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    (blind,) = world.largest([0.0 if is_seen else float(world.rank)])
    if world.is_main:
        mark.unlink(missing_ok=True)
    if blind and not is_cache:
        raise RunError(
            f"rank {blind:.0f} does not see the folder {folder} of rank 0. If a run spans "
            "several machines, these must share a disk: choose a folder on it, or set "
            "train.output_dir to the URL of a bucket (s3://..., gs://...), which is enough"
        )
    return not blind


def _refuse_another_run(folder: RunFolder, recipe: Recipe) -> None:
    run_recipe, steps = folder.path / RUN_RECIPE, _steps(folder)
    place = recipe.train.output_dir
    if not run_recipe.exists():
        if steps:
            raise RunError(
                f"train.output_dir: {place} contains checkpoint-{max(steps)} of a run without "
                f"{RUN_RECIPE}, so Surefoot did not write it; choose another folder"
            )
        return
    if not steps:
        return
    here = f" (and {folder.path})" if folder.away else ""
    found = changes_in(folder.path, load(run_recipe), recipe)
    refuse_in_own(found, f"{place}{here}")
    say(found, "the last start")


def _is_below(path: str, settings: Collection[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in settings)


def _is_within(resume: str, output_dir: Path | Address) -> bool:
    """Whether ``resume`` is the URL of a checkpoint of the run in ``output_dir``."""
    is_remote = isinstance(output_dir, Address) and is_address(resume)
    return is_remote and Address(resume).parent == output_dir


def _is_inside(path: str, folder: Path) -> bool:
    return not is_address(path) and Path(path).resolve().parent == folder.resolve()


def write_recipe(folder: RunFolder, resolved: str) -> None:
    """Write the resolved recipe into the run's folder and store, which so prove to be writable."""
    text = resolved.encode()
    with raising(RunError, "recipe"):
        write_aside(folder.path / RUN_RECIPE, text)
    if folder.away is not None:
        folder.away.write(RUN_RECIPE, text)


def recipe_of(checkpoint: Path) -> Recipe | None:
    """The recipe in a checkpoint of Surefoot; None if it has none, as one that another loop saved,
    or one that this version cannot read."""
    if not (checkpoint / RUN_RECIPE).is_file():
        return None
    try:
        return load(checkpoint)
    except RecipeError as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s: its settings are not compared: %s", checkpoint.name, reason)
        return None


def no_choice(recipe: Recipe, _world: World) -> MemorySettings:
    """Raise ``RecipeError`` if something is auto: nobody is there to choose."""
    return recipe.memory_settings


def with_chosen_settings(
    recipe: Recipe, folder: RunFolder, world: World, choose: MemoryChoice
) -> Recipe:
    """``recipe`` with values for what is auto (``MemorySettings``): those of the run, if it has
    begun, or what rank 0 chooses. A collective call."""
    if recipe.is_fitted:
        return recipe
    settings, error = None, None
    if world.is_main:
        try:
            path = folder.path / RUN_RECIPE
            known = recipe.filled_from(load(path)) if path.exists() and _steps(folder) else recipe
            settings = known.memory_settings if known.is_fitted else choose(known, world)
        except SurefootError as found:
            error = found
    settings, error = world.from_main((settings, error))
    if error is not None:
        raise error
    per_rank = max(1, recipe.train.global_batch_size // world.num_data_ranks)
    size = fitting_micro_batch(per_rank, settings.micro_batch_size)
    model = replace(recipe.model, gradient_checkpointing=settings.gradient_checkpointing)
    train = replace(recipe.train, micro_batch_size=size)
    return recipe.filled_from(replace(recipe, model=model, train=train))


def begun(
    folder: RunFolder, saves: CheckpointSection, train: TrainSection
) -> tuple[Path | None, RunMirror | None]:
    """Where a run begins (``resume_point``), and what uploads it from there on, if it is stored in
    a bucket."""
    while True:
        start = resume_point(folder, saves, train)
        if folder.away is None:
            return start, None
        if (mirror := folder.away.mirror(start)) is not None:
            return start, mirror
        logger.info("%s: another launch of this run has begun: looking again", folder.away.address)


def resume_point(folder: RunFolder, saves: CheckpointSection, train: TrainSection) -> Path | None:
    """The checkpoint to resume from, or None to start from scratch; those that fail verification
    are logged, renamed, and skipped. Raises ``RunError`` if ``none`` is set, but the folder
    contains valid checkpoints, ``CheckpointError`` if the requested one is missing or damaged, or
    if there are checkpoints and none is valid."""
    for leftover in clean(folder.path):
        logger.info("removed %s, the temporary folder of an interrupted save", leftover.name)
    resume, steps = saves.resume, _steps(folder)
    if resume == "none":
        if steps:
            _set_aside_damaged(folder, train.output_dir, max(steps))
        return None
    is_own = _is_within(resume, train.output_dir) or _is_inside(resume, folder.path)
    if resume == "auto" or (steps and not is_own):
        if folder.away is not None:
            return folder.away.newest_sound()
        return recover_latest(folder.path, from_scratch=_FROM_SCRATCH)
    if not is_address(resume):
        target = _target(Path(resume))  # its own are known by one name, however they are spelled
        resume = str(folder.path / target.name if is_own else target)
    name = Path(resume).name
    step = step_of(Path(folder.away.local_name(name) if is_own and folder.away else name))
    if is_own and any(later > step for later in steps):
        raise RunError(
            f"checkpoint.resume: {train.output_dir} contains later checkpoints than "
            f"checkpoint-{step} (up to checkpoint-{max(steps)}), which training would reach; "
            "choose another train.output_dir"
        )
    return _requested_checkpoint(folder, saves, train.cache_dir)


def _target(path: Path) -> Path:
    """The checkpoint that a link such as ``latest`` leads to. Raises ``CheckpointError`` if it is
    the folder of a run."""
    target = path.resolve() if step_of(path) < 0 and path.is_symlink() else path
    if is_run(target):
        names = [folder.name for folder in named(target)]
        raise CheckpointError(
            f"checkpoint.resume: {path} is the folder of a run; name one of its checkpoints "
            f"({', '.join(names[-3:])}), such as checkpoint.resume={path / names[-1]}; to resume "
            f"that run itself, `surefoot train {path}`"
        )
    return target


def _set_aside_damaged(folder: RunFolder, place: Path | Address, latest: int) -> None:
    """Rename the checkpoints of a local run, none of which is valid. Raises ``RunError`` if one
    is: nothing that a run can resume from is put away."""
    search = find_latest(folder.path) if folder.away is None else None
    if search is None or search.path is not None:
        name = f"checkpoint-{latest}" if search is None or search.path is None else search.path.name
        raise RunError(
            f"checkpoint.resume is none, but {place} contains {name}; choose "
            "another train.output_dir"
        )
    refuse_foreign(search)
    set_aside(search)
    logger.warning("no checkpoint in %s is valid: starting from scratch", folder.path)


def _steps(folder: RunFolder) -> set[int]:
    """The steps that the run has saved, here or in its store."""
    here = {step_of(path) for path in committed(folder.path)}
    return here | set(folder.away.steps if folder.away else ())


def _requested_checkpoint(
    folder: RunFolder, section: CheckpointSection, cache_dir: Path | None
) -> Path:
    resume = section.resume
    if not is_address(resume):
        is_step = size_of(Path(resume)) is not None and names_save(Path(resume))
        if not is_step and not is_folder(Path(resume)):
            raise CheckpointError(f"checkpoint.resume: no checkpoint folder {resume}")
        if not is_step and has_manifest(Path(resume)):
            expect_valid(Path(resume))
        return Path(resume)
    remote = Address(resume)
    if folder.away is not None and remote.parent == folder.away.address:
        return folder.away.get(remote.name)
    if folder.is_apart:
        raise RunError(
            f"checkpoint.resume: {resume} is of another run, and the machines of this one have no "
            "folder in common: copy it to the same path on each machine, and name that path"
        )
    return stores().fetch(remote, cache_dir, seconds=section.remote_seconds)


def hash_of_settings(section: object, *, has_plateau: bool = False) -> str:
    """A hash of the settings in ``section`` on which weights depend; of those of evaluations, too,
    if the learning rate follows them."""
    free = [
        path
        for path, may in schema.changeable(section).items()
        if not (may.is_schedule or (may.is_evaluation and has_plateau))
    ]
    settings = {
        path: value for path, value in _flat(schema.write(section), ()) if not _is_below(path, free)
    }
    return digest(json.dumps(settings, sort_keys=True, default=str).encode())


def settings_of_launches(section: object) -> dict[str, object]:
    """The values of the settings in ``section`` that may differ between the launches of a run, and
    on which bits depend; by their paths."""
    free = [path for path, may in schema.changeable(section).items() if may.means]
    values = _flat(schema.write(section), ())
    return {path: value for path, value in values if _is_below(path, free)}


def _flat(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """The plain values in ``value``, by their dotted paths."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, (*path, str(name)))
    else:
        yield ".".join(path), value
