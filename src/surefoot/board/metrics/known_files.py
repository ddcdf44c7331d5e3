"""Metrics of the runs that were looked at last, in memory: all of them, or at once an excerpt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from .excerpt import MetricsExcerpt, excerpt_of
from .metrics_file import MetricsFile

_MAX_FILES = 24
_PAUSE = 0.2  # seconds in which a page is drawn before a long file is read


@dataclass
class _Known:
    metrics: MetricsFile
    excerpt: MetricsExcerpt | None = None  # while another thread reads the file

    def read(self) -> None:
        try:
            self.metrics.refresh()
        finally:  # else a page would wait for ever
            self.excerpt = None


@dataclass
class KnownFiles:
    """Files of metrics, each read once and then followed."""

    _files: OrderedDict[Path, _Known] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self, path: Path) -> MetricsFile:
        """All records of a file."""
        found = self._known(path).metrics
        found.refresh()
        return found

    def soon(self, path: Path) -> MetricsFile | MetricsExcerpt:
        """The same; of a long file that is not read yet an excerpt, and another thread reads it."""
        known = self._known(path)
        with self._lock:
            if known.excerpt is None and known.metrics.is_behind:
                known.excerpt = excerpt_of(known.metrics)
                reading = threading.Timer(_PAUSE, known.read)
                reading.daemon = True
                reading.start()
            excerpt = known.excerpt
        return excerpt if excerpt is not None and known.metrics.is_behind else self.now(path)

    def _known(self, path: Path) -> _Known:
        with self._lock:
            found = self._files.pop(path, None) or _Known(MetricsFile(path))
            self._files[path] = found
            while len(self._files) > _MAX_FILES:
                self._files.popitem(last=False)
            return found
