"""Export a model with quantized weights, its adapter merged, in the format of compressed-tensors.

Weights go from file to file rows by rows; memory does not grow with the model.
"""

from __future__ import annotations

import json
from pathlib import Path

from ...checkpoint.converting.targets import refuse_taken
from ...checkpoint.disk.commit import new_folder, write_small
from ...checkpoint.sources import DtypeName, Progress, TensorSource, copy
from ...errors import ModelError
from ...storage import files
from ...use.exporting.conversion import meta_model, num_weights, whole_model
from ...use.exporting.receipt import Artefact, write_receipt
from ...use.model_loading import ModelFolders
from .calibration import Calibrator, calibration_rows
from .layerwise import open_layerwise
from .schemes import LinearLayers, QuantizedSource, WeightScheme, find_linear_layers, scheme_of
from .target import QuantizedFolder

_ROWS = 128  # of the training data, for calibration
_SCRATCH = ".calibrated"
_WITHOUT_EXPERTS = ("w8a8",)  # transformers 5 dequantizes the others' as it opens them


def write_quantized(
    wanted: QuantizedFolder, parts: ModelFolders, target: Path, progress: Progress
) -> None:
    """Write the model of ``parts`` with quantized weights into the new folder ``target``. Raises
    ``ModelError`` for a layer that the scheme does not fit, or a scheme that the algorithm does not
    calibrate, ``CheckpointError`` for damaged weights, NaN in them, or a write that fails."""
    # A choice of the command line is a text.
    size = None if wanted.group_size is None else int(wanted.group_size)
    scheme = scheme_of(wanted.quantize, size)
    if wanted.algorithm == "gptq" and not scheme.is_integer:
        raise ModelError(f"--algorithm gptq: {wanted.quantize} has no integers; use w4a16 or w8a8")
    refuse_taken(target)
    source, small, layers = _quantized(parts, scheme, wanted.dtype)
    settings = {"algorithm": wanted.algorithm, "group_size": scheme.args.group_size}
    with new_folder(target, may_be_empty=True) as folder:
        tensors: TensorSource = source
        if wanted.algorithm != "rtn":
            model = open_layerwise(source.source, small["config.json"], str(parts.folder))
            rows = calibration_rows(parts, _ROWS)
            calibrator = Calibrator(model, layers, scheme)
            # In the new folder, so that it goes with it if the export fails.
            tensors = calibrator.run(rows, folder / _SCRATCH)
            if calibrator.rounded:
                settings["num_rounded"] = len(calibrator.rounded)
        copy(tensors, folder, max_shard_size=wanted.max_shard_size, progress=progress)
        files.remove_tree(folder / _SCRATCH)
        write_small(folder, small)
        count = num_weights(source.source)
        artefact = Artefact("compressed-tensors", scheme.name, count, settings=settings)
        write_receipt(folder, parts, artefact)


def _quantized(
    parts: ModelFolders, scheme: WeightScheme, dtype: DtypeName | None
) -> tuple[QuantizedSource, dict[str, bytes], LinearLayers]:
    """The tensors to write, the small files beside them, and the layers that are quantized."""
    where = str(parts.folder)
    if parts.gives_scores:
        raise ModelError(
            f"{where}: is a reward model or classifier; only models that write text are quantized"
        )
    whole, small = whole_model(parts, dtype=dtype)
    model = meta_model(parts.model, False, parts.reading)
    layers = find_linear_layers(model, whole.shapes(), where)
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
