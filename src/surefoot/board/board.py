"""The board's own state: its folder, and caches of what it has read. No restart needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .chat import Conversations
from .commands import ChildCommands
from .metrics.excerpt import MetricsExcerpt
from .metrics.known_files import KnownFiles
from .metrics.metrics_file import MetricsFile
from .run_folders import METRICS
from .run_summary import Summaries


@dataclass
class Board:
    """Runs below ``root``, an absolute path without symbolic links."""

    root: Path
    is_read_only: bool = False
    folders: Sequence[Path] | None = None  # besides root, what recipes may name; None: anything
    summaries: Summaries = field(init=False)
    commands: ChildCommands = field(init=False)
    conversations: Conversations = field(init=False)
    _metrics: KnownFiles = field(default_factory=KnownFiles)

    def __post_init__(self) -> None:
        self.summaries = Summaries(self.root)
        self.commands = ChildCommands(self.root)
        self.conversations = Conversations(self.root)

    def facts(self) -> dict[str, object]:
        """What each page shows of the board itself."""
        return {"root": str(self.root), "is_read_only": self.is_read_only}

    def metrics(self, folder: Path) -> MetricsFile:
        """The metrics of a run, as they are now."""
        return self._metrics.now(folder / METRICS)

    def metrics_soon(self, folder: Path) -> MetricsFile | MetricsExcerpt:
        """The same; of a long file that is not read yet an excerpt, and another thread reads it."""
        return self._metrics.soon(folder / METRICS)

    async def close(self) -> None:
        """End what belongs to the board; training does not."""
        await self.commands.close()
        await self.conversations.close()
