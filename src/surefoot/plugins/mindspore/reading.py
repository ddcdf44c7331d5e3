"""What a user may state of a folder of MindSpore, on the command line or in a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .ranks import rank_folders, root_of
from .tensor_layout import ParallelConfig

KEEP = "keep"
FamilyName = Literal[
    "keep",
    "legacy",
    "legacy-fused",
    "mcore",
    "mcore-mla",
    "mcore-v1",
    "mcore-fused",
    "mcore-contiguous",
]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options for reading a folder of MindSpore."""

    names: FamilyName | None = None
    """What MindSpore Transformers calls the weights in SRC; keep: as they are."""

    strategy: Path | None = None
    """MindSpore's strategy files of SRC, if not beside its ranks."""

    source_parallel_config: ParallelConfig | None = None
    """How SRC is sharded over its ranks, if there are no strategy files: the parallel_config of the
    training, as data_parallel=2,model_parallel=4. Every file is checked against the configuration
    of the model. Without it, the shapes say it if only one way gives them."""

    def fits(self, folder: Path) -> bool:
        """Whether ``folder`` has ranks, of which a strategy can be stated."""
        return self.names is not None or bool(rank_folders(root_of(folder)))
