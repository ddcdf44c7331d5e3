"""The board's own state: its folder, and caches of what it has read. No restart needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RunError
from ..storage.address import Address
from .chat import Conversations
from .commands import ChildCommands
from .metrics.excerpt import MetricsExcerpt
from .metrics.known_files import KnownFiles
from .metrics.metrics_file import MetricsFile
from .run_folders import METRICS
from .run_summary import Summaries
from .stores.store_runs import StoreRuns, open_store


@dataclass
class Board:
    """Runs below ``root``, an absolute path without symbolic links. For runs in an object store,
    it is the folder of their copies."""

    root: Path
    store: StoreRuns | None = None
    is_read_only: bool = False
    folders: Sequence[Path] | None = None  # besides root, what recipes may name; None: anything
    summaries: Summaries = field(init=False)
    commands: ChildCommands = field(init=False)
    conversations: Conversations = field(init=False)
    _metrics: KnownFiles = field(default_factory=KnownFiles)

    def __post_init__(self) -> None:
        self.summaries = Summaries(self.root)
        if self.store is not None:
            store = self.store
            self.summaries = Summaries(self.root, store.state_of, lambda: store.sizes)
        self.commands = ChildCommands(self.workplace)
        self.conversations = Conversations(self.workplace)

    @property
    def workplace(self) -> Path:
        """The folder in which commands are called."""
        return Path.cwd() if self.store else self.root

    def facts(self) -> dict[str, object]:
        """What each page shows of the board itself."""
        return {
            "root": str(self.store.address if self.store else self.root),
            "problem": self.store.problem if self.store else None,
            "is_store": self.store is not None,
            "is_read_only": self.is_read_only,
        }

    def typed(self, path: Path) -> str:
        """A run or checkpoint as a command names it."""
        return str(self.store.address_of(path) if self.store else path)

    def must_be_local(self, advice: str) -> None:
        """Raises ``RunError`` if the runs are in an object store."""
        if self.store is not None:
            raise RunError(f"the runs of this board are in {self.store.address}: {advice}")

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


def open_board(root: Path | Address, *, is_read_only: bool = False) -> Board:
    """The board of the runs below a folder or an address. Raises ``SurefootError``."""
    if isinstance(root, Path):
        return Board(root.resolve(), is_read_only=is_read_only)
    store = open_store(root)
    return Board(store.folder, store, is_read_only=is_read_only)
