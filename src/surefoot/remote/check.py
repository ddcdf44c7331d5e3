"""Verify a checkpoint in a store: the stored files are checked, not a local copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..checkpoint.disk.commit import step_of
from ..checkpoint.looking.listing import CheckpointLine
from ..checkpoint.reading.verification import Report
from ..errors import CheckpointError
from ..storage.address import Address
from .downloading import verify
from .store import Store


def verify_store(checkpoint: Address, *, full: bool, seconds: float = 60) -> Report:
    """Check lengths and manifest; with ``full`` every byte. Raises ``StoreError``."""
    if step_of(Path(checkpoint.name)) < 0:
        raise CheckpointError(f"{checkpoint}: expected the URL of a checkpoint, …/checkpoint-N")
    return verify(Store(checkpoint.parent, seconds=seconds), checkpoint.name, full=full)


def verified_line(run: Address, line: CheckpointLine, *, seconds: float = 60) -> CheckpointLine:
    """The same line, every byte checked. ``run`` may be the address of the checkpoint itself."""
    if line.problem is not None:
        return line
    address = run if run.name == line.path.name else run.inside(line.path.name)
    report = verify_store(address, full=True, seconds=seconds)
    if report.ok:
        return replace(line, verified="every byte")
    return replace(line, problem=report.problems[0].removeprefix(f"{address}/"))
