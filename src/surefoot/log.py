"""Logging for the whole package: one logger tree, text for people, nothing else on the screen.

Modules use ``logging.getLogger(__name__)``; the CLI calls ``configure`` once. Under torchrun only
rank 0 speaks below WARNING, and every other line carries its rank.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .terminal_text import visible

logger = logging.getLogger(__name__)
SPEAKS_AFTER = 5.0  # seconds of waiting
QUIET = ("transformers", "huggingface_hub", "datasets", "peft", "matplotlib", "filelock")


class _Ranked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = visible(super().format(record))
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        rank = os.environ.get("RANK", "0")
        return f"[rank {rank}] {text}" if rank != "0" else text


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error as it is now: rich puts its own in place while a live line is on."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


@contextmanager
def announced(what: str, *arguments: object) -> Iterator[None]:
    """A block that may wait for others: after some seconds it says for what, until when, and what
    to do if that never comes."""
    timer = threading.Timer(SPEAKS_AFTER, logger.warning, (f"waiting for {what}", *arguments))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fell_back(what: str, reason: str, cost: str, level: int = logging.WARNING) -> None:
    """Say that a slower, larger or weaker way is taken than the usual one: ``what`` is done
    instead, the ``reason`` why the usual way is closed, and what that costs. The only way to take
    one: a test walks everything that catches an error or logs such a line
    (docs/decisions/0100)."""
    logger.log(level, "%s, which %s: %s", what, cost, reason)


@contextmanager
def silenced() -> Iterator[None]:
    """A block without log lines: of something that is tried, and done again later."""
    root = logging.getLogger("surefoot")
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)


def configure(*, verbose: bool = False, formatter: logging.Formatter | None = None) -> None:
    """Send the package's log to standard error, in plain lines. With a ``formatter`` of its own,
    warnings of other packages leave by it, too."""
    handler = _Stderr()
    handler.setFormatter(formatter or _Ranked("%(message)s"))
    # Asked for each line: a program may configure the log before it has joined the ranks of SLURM.
    handler.addFilter(
        lambda record: record.levelno >= logging.WARNING or os.environ.get("RANK", "0") == "0"
    )
    root = logging.getLogger("surefoot")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.propagate = False
    if formatter is not None:
        logging.captureWarnings(capture=True)
        logging.getLogger().handlers[:] = [handler]
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not verbose:
        warnings.filterwarnings("ignore")
        # a resume is then not exact: train.deterministic could not be kept
        warnings.filterwarnings("once", ".* does not have a deterministic implementation")
