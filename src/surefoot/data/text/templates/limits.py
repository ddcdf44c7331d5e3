"""A limit of time and memory for a template, which may be a stranger's.

Jinja's sandbox keeps a template from files and attributes, not from ``{{ 9 ** 9 ** 9 }}`` or loops
without end, and nothing in Python interrupts a single operation. So short conversations are first
rendered in another process, which the system ends. It is no fork, as a fork may find a lock taken
by a thread that it has not.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....errors import TemplateError, counted
from .trial import NO_MEMORY

SECONDS = 5  # of a core; real templates take milliseconds
MEMORY = 1 << 30  # bytes beyond those of a process that has done nothing yet
_TRIAL = Path(__file__).with_name("trial.py")
_ADVICE = "do not use it; data.template: NAME takes another"


def try_within_limits(source: str, conversations: Sequence[Mapping[str, object]]) -> None:
    """Render ``conversations``, each the names that the template sees, within ``SECONDS`` of a core
    and ``MEMORY``.

    Raises ``TemplateError`` if it needs more. What the template itself raises is not told.
    """
    task = {"source": source, "conversations": conversations, "seconds": SECONDS, "memory": MEMORY}
    done = subprocess.run(
        [sys.executable, "-P", str(_TRIAL)],
        input=json.dumps(task),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TemplateError(
            f"the chat template renders a short conversation for more than "
            f"{counted(SECONDS, 'second')}; {_ADVICE}"
        )
    if done.returncode == NO_MEMORY:
        raise TemplateError(
            f"the chat template needs more than {MEMORY >> 20:,} MiB for a short conversation; "
            f"{_ADVICE}"
        )
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise TemplateError(f"the chat template cannot be tried: {why or done.returncode}")
