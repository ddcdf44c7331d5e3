"""``--to gguf`` and ``--to gguf-adapter``; what writes them is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from ...checkpoint.converting.targets import Alone, Done, Origin, Target
from ...checkpoint.sources import Progress
from ...use.exporting.conversion import model_folders

AdapterFormat = Literal["f16", "f32", "bf16", "q8_0"]
BlockFormat = Literal["q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q5_0", "q4_0"]
ModelFormat = Literal[AdapterFormat, BlockFormat]


@dataclass(frozen=True, kw_only=True)
class GGUF(Target):
    """One GGUF file for llama.cpp and Ollama, with a Modelfile beside it."""

    suffix: ClassVar[str] = ".gguf"
    may_not_open: ClassVar[bool] = True
    package: ClassVar[str | None] = "gguf"

    quantize: ModelFormat = "f16"
    """Type of the weights; unset, the first of each target."""

    base: str | None = None
    """The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed)."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """The file, and what Ollama needs beside it."""
        module = import_module(f"{__package__}.export")
        module.write_model(model_folders(origin), target, self.quantize, progress)
        return Done()

    @classmethod
    def open_alone(cls, written: Path, tokenizer: object) -> Alone:
        """The file by itself, with the stops of the Modelfile beside it."""
        alone: Alone = import_module(f"{__package__}.reading_back").GGUFAlone(written, tokenizer)
        return alone

    @classmethod
    def unread_settings(cls, written: Path) -> Mapping[str, object]:
        """The size of a head, where it is not the one that transformers computes by itself."""
        read: Mapping[str, object] = import_module(f"{__package__}.reading_back").head_size(written)
        return read


@dataclass(frozen=True, kw_only=True)
class GGUFAdapter(GGUF):
    """A LoRA adapter, not merged, as a GGUF file for a GGUF of its base."""

    quantize: AdapterFormat = "f16"
    """Type of the weights."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """The file."""
        module = import_module(f"{__package__}.export")
        module.write_adapter(model_folders(origin), target, self.quantize, progress)
        return Done()
