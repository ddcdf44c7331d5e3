"""Convert ``train_dataset`` of a YAML file of MindSpore Transformers, as far as possible.

Loaders of rows (a dataset of a hub, or a file) become an entry for ``dataset_info.json``, which the
user adds, and the corresponding settings. Loaders of pretokenized data, MindRecord or Megatron's
``.bin``, contain no rows; the result says what to add instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from .keys import Converted

_ROWS = ("HFDataLoader", "CommonDataLoader")
_FILES = ("json", "csv", "parquet", "text")  # kinds of files that load_dataset is asked for
_TOKENS = {
    "MindDataset": "MindRecord files",
    "TFRecordDataset": "TFRecord files",
    "BlendedMegatronDatasetDataLoader": "Megatron's .bin files",
}
_ADD = "set data.dataset_dir and data.datasets to the training data"


def read_data(told: Mapping[str, Any], done: Converted) -> None:
    """Add the settings of ``train_dataset``, and what the user must add."""
    section = told.get("train_dataset")
    loader = section.get("data_loader") if isinstance(section, Mapping) else None
    if not isinstance(loader, Mapping):
        done.advice.append(f"no train_dataset: {_ADD}")
        return
    kind = str(loader.get("type"))
    if kind not in _ROWS:
        what = f", {_TOKENS[kind]} with tokens," if kind in _TOKENS else ""
        hint = f"{_ADD}, the rows themselves"
        done.advice.append(f"train_dataset: {kind}{what} is not supported; {hint}")
        return
    entry = _entry(loader)
    if entry is None:
        done.advice.append(f"train_dataset: {kind} names neither a dataset nor a file; {_ADD}")
    else:
        name, content = entry
        done.settings["data.datasets"] = [name]
        line = json.dumps({name: content}, ensure_ascii=False)
        done.advice.append(f"train_dataset: add {line} to dataset_info.json in data.dataset_dir")
    if isinstance(loader.get("shuffle"), bool):
        done.settings["data.shuffle"] = loader["shuffle"]
    for handler in loader.get("handler") or ():
        _take_handler(handler, done)


def _entry(loader: Mapping[str, Any]) -> tuple[str, dict[str, object]] | None:
    """A dataset's name, and its entry for ``dataset_info.json``."""
    path, files = loader.get("path"), loader.get("data_files")
    if isinstance(files, Mapping):
        files = files.get("train")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if path in _FILES and isinstance(files, str):
        return _plain(PurePath(files).stem), {"file_name": files}
    if not isinstance(path, str) or not path or path in _FILES:
        return None
    if loader.get("load_func") == "load_from_disk" or path.startswith((".", "/", "~")):
        return _plain(PurePath(path).name), {"file_name": path}
    found: dict[str, object] = {"hf_hub_url": path}
    found |= {
        ours: loader[theirs]
        for theirs, ours in (("split", "split"), ("name", "subset"))
        if isinstance(loader.get(theirs), str)
    }
    return _plain(PurePath(path).name), found


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name) or "data"


def _take_handler(handler: Any, done: Converted) -> None:
    """One processing step from rows to tokens."""
    told = handler if isinstance(handler, Mapping) else {"type": handler}
    kind = str(told.get("type"))
    if type(told.get("seq_length")) is int:
        done.settings["data.cutoff_len"] = told["seq_length"]
    if kind == "take" and type(told.get("n")) is int:
        done.settings["data.max_samples"] = told["n"]
    elif kind == "PackingHandler":
        done.settings["data.packing"] = True
    elif kind != "AlpacaInstructDataHandler":
        done.advice.append(
            f"train_dataset: {kind} is not converted; the columns of rows, and their meaning, "
            "are set in dataset_info.json"
        )
