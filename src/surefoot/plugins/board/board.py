"""The board's own state: its folder, and caches of what it has read. No restart needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .chat import Conversations
from .metrics import MetricsFile
from .processes import ChildCommands
from .run_folders import METRICS
from .run_summary import Summaries

_MAX_FILES = 24  # of metrics in memory: of the runs that were looked at last


@dataclass
class Board:
    """Runs below ``root``, an absolute path without symbolic links."""

    root: Path
    is_read_only: bool = False
    folders: Sequence[Path] | None = None  # besides root, what recipes may name; None: anything
    summaries: Summaries = field(init=False)
    commands: ChildCommands = field(init=False)
    conversations: Conversations = field(init=False)
    _metrics: Callable[[Path], MetricsFile] = field(
        default_factory=lambda: lru_cache(_MAX_FILES)(MetricsFile)
    )

    def __post_init__(self) -> None:
        self.summaries = Summaries(self.root)
        self.commands = ChildCommands(self.root)
        self.conversations = Conversations(self.root)

    def facts(self) -> dict[str, object]:
        """What each page shows of the board itself."""
        return {"root": str(self.root), "is_read_only": self.is_read_only}

    def metrics(self, folder: Path) -> MetricsFile:
        """The metrics of a run, as they are now."""
        metrics = self._metrics(folder / METRICS)
        metrics.refresh()
        return metrics

    async def close(self) -> None:
        """End what belongs to the board; training does not."""
        await self.commands.close()
        await self.conversations.close()
