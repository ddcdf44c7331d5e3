"""Export a model with quantized weights, its adapter merged, in the format of compressed-tensors.

Weights go from file to file rows by rows; memory does not grow with the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...checkpoint.converting.targets.huggingface import refuse_taken
from ...checkpoint.disk.atomic_folder import new_folder, write_small
from ...checkpoint.sources.copying import DtypeName, copy
from ...checkpoint.sources.source import TensorSource
from ...cli.exporter import Progress
from ...errors import ModelError
from ...recipe.run_checkpoint import Damaged
from ...storage import files
from ...use.exporting.base_model import meta_model
from ...use.exporting.exported import counting, num_bytes, num_weights, whole_model
from ...use.model_loading import ModelFolders, find_parts, is_reward, with_valid
from ...use.receipts.receipt import Artefact, write_receipt
from .calibration import Calibrator
from .layerwise import open_layerwise
from .linear_layers import LinearLayers, find_linear_layers
from .quantized_source import QuantizedSource
from .rows import calibration_rows
from .schemes import WeightScheme, scheme_of

Algorithm = Literal["rtn", "gptq"]
_ROWS = 128  # of the training data, for calibration
_SCRATCH = ".calibrated"
_WITHOUT_EXPERTS = ("fp8-block", "w8a8")  # transformers 5 dequantizes the others' as it opens them


@dataclass(frozen=True)
class QuantizeOptions:
    """How weights are rounded."""

    group_size: int | None = None
    """Inputs that share a scale, of w4a16; unset, 128."""
    algorithm: Algorithm = "rtn"
    """``rtn`` rounds to nearest; ``gptq`` calibrates on the run's training data."""

    def check(self, quantize: str, scheme: WeightScheme) -> None:
        """Raise ``ModelError`` for a scheme that the algorithm does not calibrate."""
        if self.algorithm == "gptq" and not scheme.is_integer:
            raise ModelError(f"--algorithm gptq: {quantize} has no integers; use w4a16 or w8a8")


DEFAULTS = QuantizeOptions()


def export_quantized(
    path: str | Path,
    out: str | Path,
    *,
    quantize: str,
    options: QuantizeOptions = DEFAULTS,
    base: str | Path | None = None,
    dtype: DtypeName | None = None,
    max_shard_size: int = 5_000_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model at ``path`` (see ``locate``) with quantized weights into the new folder
    ``out``.

    Args:
        path: a run, checkpoint or model; an adapter is merged into its base.
        out: a new or empty folder.
        quantize: one of ``PRESETS``.
        options: how the weights are rounded.
        base: the base of an adapter, if it is not where the adapter says.
        dtype: of what is not quantized, and of the scales; unset, as stored.
        max_shard_size: largest weight file in bytes.
        progress: called with the bytes written and the total.

    Raises:
        ModelError: nothing to export there, a layer that the scheme does not fit, ``out`` is taken.
        CheckpointError: damaged weights, NaN in them, or a write that fails.
    """
    target, scheme = Path(out).expanduser().absolute(), scheme_of(quantize, options.group_size)
    options.check(quantize, scheme)

    def find(damaged: Damaged) -> ModelFolders:
        parts = find_parts(path, base=base, damaged=damaged)
        refuse_taken(target)
        return parts

    def write(parts: ModelFolders) -> None:
        source, small, layers = _quantized(parts, scheme, dtype)
        settings = {"algorithm": options.algorithm, "group_size": scheme.args.group_size}
        with new_folder(target, may_be_empty=True) as folder:
            found: TensorSource = source
            if options.algorithm != "rtn":
                model = open_layerwise(source.source, small["config.json"], str(parts.folder))
                rows = calibration_rows(parts, _ROWS)
                calibrator = Calibrator(model, layers, scheme)
                found = calibrator.run(rows, folder / _SCRATCH)
                if calibrator.rounded:
                    settings["num_rounded"] = len(calibrator.rounded)
            advance = counting(num_bytes(found), progress)
            copy(found, folder, max_shard_size=max_shard_size, progress=advance)
            files.remove_tree(folder / _SCRATCH)
            write_small(folder, small)
            count = num_weights(source.source)
            artefact = Artefact("compressed-tensors", scheme.name, count, settings=settings)
            write_receipt(folder, parts, artefact)

    with_valid(find, write)
    return target


def _quantized(
    parts: ModelFolders, scheme: WeightScheme, dtype: DtypeName | None
) -> tuple[QuantizedSource, dict[str, bytes], LinearLayers]:
    """The tensors to write, the small files beside them, and the layers that are quantized."""
    where = str(parts.folder)
    if is_reward(parts):
        raise ModelError(f"{where}: is a reward model; only models that write text are quantized")
    whole, small = whole_model(parts, dtype=dtype)
    layers = find_linear_layers(meta_model(parts.model, False), whole.shapes(), where)
    if layers.experts and scheme.name in _WITHOUT_EXPERTS:
        raise ModelError(
            f"{where}: has experts, which transformers does not open in {scheme.name}; use "
            "--quantize fp8 or w4a16"
        )
    scheme.check({name: whole.shapes()[name] for name in layers.ordered}, where)
    config = json.loads(small["config.json"])
    config["quantization_config"] = scheme.config(layers.ignored)
    small["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return QuantizedSource(whole, scheme, layers.names), small, layers


def write_quantized(path: str, out: Path, given: Mapping[str, Any], progress: Progress) -> Path:
    """``export --to compressed-tensors``."""
    rest = dict(given)
    size, algorithm = rest.pop("group_size"), rest.pop("algorithm")
    options = QuantizeOptions(None if size is None else int(size), algorithm)
    return export_quantized(path, out, options=options, progress=progress, **rest)
