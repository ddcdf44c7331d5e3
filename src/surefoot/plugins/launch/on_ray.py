"""Ray: `TorchTrainer` starts a worker for each rank, and Surefoot trains inside it.

Ray starts the workers again when one of them or its node is lost, as many as there is room for, and
they resume. It does not let a run save that is stopped, so the driver requests that by the run's
folder. And it retries whatever a worker raises, so an error that only the user can fix is returned.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from ray.exceptions import RayError
from ray.train import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    get_context,
    get_preemption_info,
)
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

from ...checkpoint.remote import stores
from ...errors import (
    SKIPPED_STEPS,
    LostPeerError,
    OutOfMemoryError,
    RunError,
    SurefootError,
    first_line,
)
from ...log import configure
from ...parallel.ray_cluster import join
from ...recipe.recipe import Recipe, dump, load_text
from ...recipe.yaml import emit
from ...run.training_run import run
from ...storage.remote import Address
from ...training.arguments import Context
from ...training.callback import TrainerCallback, TrainerControl, TrainerState
from ...training.callbacks.launches import request_stop, shown, take_stop_request
from ...use.estimate.plan import choose_settings
from .request import LaunchRequest

logger = logging.getLogger(__name__)
SETTINGS = ("address", "max_failures", "storage", "cpus")
SEES_FILES = True  # the disk of the driver
_LOOK = 1.0  # seconds between two looks for the notice of a preemption
_STORES_OF_RAY = ("s3", "gs", "gcs", "abfs", "abfss", "file")  # those of pyarrow
_AGAIN = 15.0  # seconds between two requests to stop in a store
_PAUSE = 0.5  # seconds between two looks whether the workers have ended


def document(request: LaunchRequest) -> str:
    """What Ray gets, as YAML."""
    return emit({**_plan(request), "train": request.words})


def _plan(request: LaunchRequest) -> dict[str, Any]:
    least, most = request.sizes[0], request.sizes[-1]
    return {
        "address": request.setting("address", "auto"),
        "num_workers": most if least == most else [least, most],
        "resources_per_worker": {
            "CPU": request.number("cpus", 1, 1),
            **({"GPU": 1} if request.gpus else {}),
        },
        "max_failures": request.number("max_failures", 3),
        "storage_path": _storage(request),
    }


def _storage(request: LaunchRequest) -> str:
    """Where Ray keeps its own files, which all nodes must see: beside those of the run."""
    place = request.settings.get("storage")
    if place is None:
        place = f"{request.run_folder or request.output_dir}/.ray"
        scheme, _, rest = place.partition("://")
        if rest and scheme not in _STORES_OF_RAY:
            raise RunError(
                f"--set storage=... is missing: Ray cannot keep its own files at {scheme}://; name "
                "a folder that all nodes see, or a URL of S3, Google or Azure"
            )
    return place if "://" in place else str(Path(place).absolute())


def train(recipe: Recipe, request: LaunchRequest) -> int:
    """Train ``recipe`` on a cluster; the exit code of the run. Raises ``RunError``: no cluster, or
    an error of the run that only the user can fix."""
    folder = recipe.train.folder.absolute()
    if isinstance(recipe.train.output_dir, Path):  # relative to the folder of the driver
        recipe = replace(recipe, train=replace(recipe.train, output_dir=folder))
    plan = _plan(request)
    workers = plan["num_workers"]
    join(
        plan["address"],
        "start one with `ray start --head`, name one with --set address=HOST:PORT, or train on "
        "this machine with --set address=local",
    )
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"recipe": dump(recipe), "command": shown(sys.argv[1:])},
        torch_config=TorchConfig(backend="gloo"),  # destroyed at once, so the cheap one
        scaling_config=ScalingConfig(
            num_workers=tuple(workers) if isinstance(workers, list) else workers,
            use_gpu=request.gpus > 0,
            resources_per_worker=plan["resources_per_worker"],
        ),
        run_config=RunConfig(
            name=request.name,
            storage_path=plan["storage_path"],
            failure_config=FailureConfig(max_failures=plan["max_failures"]),
        ),
    )
    place = recipe.train.output_dir
    driver = RayDriver(folder, place if isinstance(place, Address) else None)
    result = driver.fit(trainer)
    if result.get("error"):
        raise RunError(result["error"])
    if not result["signal"]:
        logger.info("trained: %d steps; the run is in %s", result["step"], place)
        return SKIPPED_STEPS if result["skipped"] else 0
    logger.info("stopped at step %d, saved; run the same command to resume", result["step"])
    return 128 + (driver.received or result["signal"])


@dataclass
class RayDriver:
    """Waits for the workers; a signal requests that they save and stop."""

    folder: Path
    address: Address | None = None  # of a run in a store, whose folder is on other machines
    received: signal.Signals | None = None
    _next: float = 0.0  # when the store is to have the request again

    def fit(self, trainer: TorchTrainer) -> dict[str, Any]:
        """What rank 0 has returned. Raises ``LostPeerError`` if the workers failed too often."""
        before = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
        # In another thread, Ray installs no handler of its own, which would kill the workers.
        pool = ThreadPoolExecutor(1)
        try:
            future: Future[Any] = pool.submit(trainer.fit)
            while not future.done():
                time.sleep(_PAUSE)
                # Until it ends: a launch that is just beginning removes the request as an old one.
                if self.received is not None:
                    self._request()
            return dict(future.result().return_value or {})
        except TrainingFailedError as error:
            raise LostPeerError(f"Ray has given up: {first_line(error)}") from error
        finally:
            pool.shutdown(wait=False)
            if self.received is not None:
                take_stop_request(self.folder)  # the last one, which came too late
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self) -> None:
        """Request that the run stops, where its rank 0 looks."""
        if self.address is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _AGAIN
            with suppress(SurefootError):  # it is not there yet, say: tried again
                list(stores().stop(self.address, wait=False))
        if self.address is None and self.folder.is_dir():
            with suppress(RunError):  # a full disk, say: tried again
                request_stop(self.folder)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:  # it insists, as with `surefoot train`
            os._exit(128 + number)
        self.received = signal.Signals(number)
        logger.warning(
            "%s received: the ranks finish their step and save; send it again to exit immediately",
            self.received.name,
        )
        if self.address is None and not self.folder.is_dir():
            logger.warning(
                "waiting until this machine sees %s; `surefoot stop` works on any that does",
                self.folder,
            )


def train_rank(config: dict[str, Any]) -> dict[str, Any]:
    """The run, as one rank, in a worker of Ray; what the driver has to know. Raises what another
    start of all workers may mend."""
    if dist.is_initialized():  # Ray's, of one backend
        dist.destroy_process_group()
    # Another port than Ray's, whose store may still listen.
    os.environ["MASTER_PORT"] = str(broadcast_from_rank_zero(_free_port()))
    configure()
    try:
        recipe = load_text(config["recipe"], "recipe", Path.cwd())
        outcome = run(
            recipe,
            callbacks=[SaveBeforePreemption()],
            choose=choose_settings,
            command=config["command"],
        )
    except LostPeerError:
        if get_context().get_world_rank():  # rank 0 may have left with an error of the user's:
            return {}  # it decides, and Ray itself notices a worker that has died
        raise
    except OutOfMemoryError:
        raise
    except SurefootError as error:
        if get_context().get_world_rank():  # Ray returns the value of rank 0 alone
            logger.error("%s", error)
        return {"error": str(error)}
    is_cut_short = outcome.signal is not None and not outcome.state.is_complete
    return {
        "signal": int(outcome.signal) if outcome.signal and is_cut_short else 0,
        "skipped": outcome.state.num_skipped,
        "step": outcome.state.global_step,
    }


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class SaveBeforePreemption(TrainerCallback):
    """Saves once Ray has notice that a node is about to be taken away."""

    _is_imminent: threading.Event = field(default_factory=threading.Event)
    _has_ended: threading.Event = field(default_factory=threading.Event)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Begin to look."""
        threading.Thread(target=self._look, daemon=True).start()

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Save, on all ranks, as flags are agreed on."""
        if self._is_imminent.is_set():
            self._is_imminent.clear()
            logger.warning("step %d: a node is about to be taken away: saving", state.global_step)
            control.should_save = True

    def on_train_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Look no more."""
        self._has_ended.set()

    def _look(self) -> None:
        """Look until there is notice. It is a barrier of all ranks, milliseconds long, and so in a
        thread of its own instead of in every step."""
        with suppress(RayError):  # a worker is lost: the barrier is reset
            while not self._has_ended.wait(_LOOK):
                if get_preemption_info() is not None:
                    self._is_imminent.set()
                    return
