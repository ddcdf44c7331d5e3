"""``surefoot stop s3://…``: an object beside the claim of a launch requests that it stops.

The process that uploads looks for it, and requests the same in the folder of the run, where rank 0
looks between two steps; then it deletes the object, by which whoever has asked knows that it was
found. It is for one launch: a later one has another number, and one that starts again in its folder
deletes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import RunError, SurefootError
from ...storage.files import parse_json
from ...storage.remote import Address
from ...training.callbacks.launches import NAME as RECORD
from ...training.callbacks.launches import request_stop
from .checkpoints import Contents
from .lineage import FIRST, StoredLaunch
from .store import MissingError, Store

INTERVAL = 15.0  # seconds between two looks of a launch, each of which is a request
_PATIENCE = 45.0  # seconds in which a launch with a network has looked
_PAUSE = 2.0  # seconds between two looks of who has asked


def keep_looking(store: Store, folder: Path, launch: int) -> None:
    """Look for a request to stop, for ever."""
    while True:
        look(store, folder, launch)
        time.sleep(INTERVAL)


def look(store: Store, folder: Path, launch: int) -> None:
    """Pass a request to stop ``launch`` on to its ``folder``. What fails is tried again later."""
    requested = StoredLaunch(launch).stop
    with suppress(SurefootError):
        store.read(requested)
        request_stop(folder)
        store.delete(requested)


def stop(address: Address, *, wait: bool) -> Iterator[str]:
    """See ``RemoteStores``."""
    store = Store(address, seconds=_PATIENCE)
    there = Contents.of(store)
    if not there.has_id:
        raise RunError(f"{address}: no run is stored there; name the URL of a run")
    launch = there.lineage.latest or StoredLaunch(FIRST)
    who = f"launch {launch.number} (on {launch.host}, process {launch.process})"
    before, is_over = _ends(store, launch)
    store.write(launch.stop, b"stop\n")
    yield f"{address}: requested of {who}, which looks every {INTERVAL:g} s"
    if not wait:
        return
    began = time.monotonic()
    while _is_there(store, launch.stop):
        if time.monotonic() - began > _PATIENCE:
            store.delete(launch.stop)
            last = before[-1] if is_over else {}
            ended = f"{last.get('outcome')} at step {last.get('step')}" if last else "killed"
            raise RunError(
                f"{address}: no process is known to train there: {who} has not looked for "
                f"{_PATIENCE:g} s; as far as is known, it is {ended}. The request is withdrawn"
            )
        time.sleep(_PAUSE)
    yield f"{address}: found; the run ends after its step, a save and its upload"
    while len((found := _ends(store, launch))[0]) <= len(before) or not found[1]:
        time.sleep(_PAUSE)
    ends = found[0]
    if ends[-1].get("outcome") == "failed":
        raise RunError(f"{address}: the run has ended, and not by a stop: {ends[-1].get('error')}")
    yield f"{address}: {ends[-1].get('outcome')} at step {ends[-1].get('step')}, saved"


def _is_there(store: Store, name: str) -> bool:
    try:
        store.read(name)
    except MissingError:
        return False
    return True


def _ends(store: Store, launch: StoredLaunch) -> tuple[list[dict[str, Any]], bool]:
    """How starts of the run have ended, by the record that ``launch`` has sent, and whether the
    last one has."""
    rows, lines = list[Any](), list[bytes]()
    with suppress(MissingError):
        lines = store.read(launch.place + RECORD).splitlines()
    for line in lines:
        with suppress(ValueError):  # the last one, of which a part was sent
            rows.append(parse_json(line))
    events = [row for row in rows if isinstance(row, dict) and "event" in row]
    ends = [row for row in events if row["event"] == "end"]
    return ends, bool(ends) and events[-1] is ends[-1]
