"""Which tensors of a model transformers keeps in float32, whatever type the model is opened in.

Known from the class of the model: no value is read, and no module is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..storage import files
from .disk import strict_json

_CONFIG = "config.json"
Kept = Callable[[str], bool]  # whether the tensor of a name keeps its type in a cast


def none_kept(_name: str) -> bool:
    """Of weights that are no model's, such as an adapter's."""
    return False


def kept_in_float32(folder: Path | None, dtype: str | None) -> Kept:
    """The tensors that keep their type where the model in ``folder`` is cast to ``dtype``; none, if
    no ``config.json`` there names a model of transformers."""
    if dtype in (None, "float32") or folder is None or not files.exists(folder / _CONFIG):
        return none_kept
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config = strict_json.read_object(folder / _CONFIG)
    # A model that reads pictures has the model of text inside, with a configuration of its own.
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
    types = [str(part.get("model_type")) for part in parts]
    known = list[object]()
    for config_class in [CONFIG_MAPPING[name] for name in types if name in CONFIG_MAPPING]:
        with suppress(KeyError, ValueError):  # of some, transformers has no class
            known.append(MODEL_MAPPING[config_class])
    attributes = ["_keep_in_fp32_modules_strict"]
    # Of float16 alone: bfloat16 has the range of float32.
    attributes += ["_keep_in_fp32_modules"] if dtype == "float16" else []
    patterns = [
        pattern.replace("*", ".*")
        for model_class in known
        for attribute in attributes
        for pattern in getattr(model_class, attribute, None) or ()
    ]
    form = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")
    return lambda name: form.search(name) is not None
