"""The meter of trainers that read pictures: import it before anything else of theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from task import Meter
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

OPENERS = (AutoModelForImageTextToText, AutoProcessor)  # imported now: whoever trains needs them
_PAGES = int(Path("/proc/self/statm").read_text().split()[1])
IDLE_MB = _PAGES * os.sysconf("SC_PAGESIZE") / 2**20  # with torch and transformers, and no trainer


class RowMeter(Meter):
    """Counts tokens by the mask, where there is one: a token of padding may be another one, too."""

    def watch(self, model: nn.Module) -> None:
        """Count the real tokens that go into ``model``."""

        def count(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("attention_mask")
            is_padded = mask is not None and mask.ndim == 2
            self.tokens += int(mask.sum()) if is_padded else kwargs["input_ids"].numel()

        model.register_forward_pre_hook(count, with_kwargs=True)

    def write(self) -> None:
        """Leave the report, with the memory above that of an idle process."""
        self.report["above_mb"] = self.report["peak_mb"] - IDLE_MB
        super().write()
