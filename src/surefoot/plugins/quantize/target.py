"""``--to compressed-tensors``; what quantizes is imported when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from ...checkpoint.converting.targets import Done, Origin, Target
from ...checkpoint.sources import DtypeName, Progress
from ...schema.named_values import ByteSize
from ...use.exporting.conversion import model_folders


@dataclass(frozen=True, kw_only=True)
class QuantizedFolder(Target):
    """A folder with quantized weights for vLLM and SGLang."""

    servers: ClassVar[Sequence[str]] = (
        "vllm serve {}",
        "python -m sglang.launch_server --model-path {}",
    )
    package: ClassVar[str | None] = "compressed_tensors"

    quantize: Literal["fp8", "w8a8", "w4a16"] = "fp8"
    """Type of the weights."""

    group_size: Literal["32", "64", "128"] | None = None
    """Inputs that share a scale, with --quantize w4a16; unset, 128."""

    algorithm: Literal["rtn", "gptq"] = "rtn"
    """How weights are rounded: rtn (unset) to nearest; w4a16 and w8a8 also by gptq, on 128 rows of
    the run's training data, which takes longer and usually loses less.
    """

    dtype: DtypeName | None = None
    """Of what is not quantized, and of the scales; unset, as stored."""

    max_shard_size: ByteSize = ByteSize(5_000_000_000)
    """Largest weight file."""

    base: str | None = None
    """The base model of an adapter, if it moved."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """A model of a run, of a checkpoint or of Hugging Face, its adapter merged."""
        module = import_module(f"{__package__}.export")
        module.write_quantized(self, model_folders(origin), target, progress)
        return Done()
