"""The model that an export begins with: its weights, dequantized if their form is one of the
``FORMS``, and the model without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...checkpoint.converting.model_files import read_config
from ...checkpoint.layouts.detection import is_sequence_classification
from ...checkpoint.layouts.opening import open_folder, open_named
from ...checkpoint.sources.source import TensorSource
from ...errors import ModelError, first_line
from ...model.config import CONFIG
from ...model.quantization import FORMS
from ...model.section import ModelSection
from ...network.shard_loading import check_fits, open_base


def base_weights(folder: Path, section: ModelSection) -> tuple[TensorSource, Mapping[str, object]]:
    """The weights in ``folder``, and the changes of its ``config.json`` that they need. Raises
    ``ModelError`` if they are not those of the model that ``config.json`` describes."""
    source, changes = _stored_weights(folder, section)
    try:
        is_scored = is_sequence_classification(folder)  # its head has another name
        check_fits(folder, section, open_named(folder) if is_scored else source)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelError(f"{folder}: cannot read the model: {first_line(error)}") from None
    return source, changes


def _stored_weights(
    folder: Path, section: ModelSection
) -> tuple[TensorSource, Mapping[str, object]]:
    stored = read_config(folder / CONFIG).get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") not in FORMS:
        return open_folder(folder), {}
    return open_base(folder, section), {"quantization_config": None}


def meta_model(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """The model in ``folder`` without its values."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelError(f"{folder}: cannot read the model: {str(error).splitlines()[0]}") from None
    return model
