"""The weights that an export begins with, dequantized if their form is one of the ``FORMS``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...checkpoint.converting.model_files import read_config
from ...checkpoint.layouts.opening import open_folder
from ...checkpoint.sources.source import TensorSource
from ...model.pretrained.positions import CONFIG
from ...model.quantization import FORMS
from ...model.section import ModelSection
from ...network.meta import open_base


def base_weights(folder: Path, section: ModelSection) -> tuple[TensorSource, Mapping[str, object]]:
    """The weights in ``folder``, and the changes of its ``config.json`` that they need."""
    stored = read_config(folder / CONFIG).get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") not in FORMS:
        return open_folder(folder), {}
    return open_base(folder, section), {"quantization_config": None}
