"""The words of ``run_mindformer.py``: ``--config FILE --run_mode finetune --load_checkpoint DIR``.

Each is a key of the file that it replaces, or needs nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import RecipeError, similar
from ...recipe.files import read_text
from ...recipe.overrides import read_arguments
from ...recipe.yaml import Document, parse, parse_argument
from ...schema import Keys

_LINE = "command line"
_TOP = (
    *("run_mode", "seed", "output_dir", "use_parallel", "load_checkpoint", "load_ckpt_format"),
    *("pretrained_model_dir", "auto_trans_ckpt", "src_strategy_path_or_dir", "resume_training"),
    *("remove_redundancy", "only_save_strategy", "predict_data", "predict_batch_size"),
    *("adapter_id", "modal_type", "do_sample", "top_k", "top_p", "temperature", "max_length"),
)
_RUNNER = ("epochs", "batch_size", "sink_mode", "sink_size", "gradient_accumulation_steps")
_PARALLEL = ("data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num")
_PLACES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in _TOP},
    **{name: ("runner_config", name) for name in _RUNNER},
    **{name: ("parallel_config", name) for name in (*_PARALLEL, "expert_parallel")},
}
_TEXT = {"load_checkpoint", "output_dir", "pretrained_model_dir", "src_strategy_path_or_dir"}
_SETTINGS = {"trust_remote_code": "model.trust_remote_code", "num_samples": "data.max_samples"}
_DATA = {"train_dataset_dir": "data.datasets", "eval_dataset_dir": "data.eval_datasets"}
# Of the device and its tools, and the code of a model: transformers has the classes.
_NOTHING = {"register_path", "device_target", "device_id", "mode", "profile", "use_legacy"}
_ALL = ("config", *_PLACES, *_SETTINGS, *_DATA, *_NOTHING)


def read_words(words: Sequence[str]) -> tuple[Document, list[str]] | None:
    """The file that ``--config`` names with the other words in it, and the overrides of a recipe;
    None without ``--config``. Raises ``RecipeError``: a word that is none of theirs."""
    if not any(word.partition("=")[0] == "--config" for word in words):
        return None
    values, overrides = read_arguments(words, lambda name: name == "predict_data")
    if empty := [name for name, given in values.items() if not given]:
        raise RecipeError(f"{_LINE}: --{empty[0]}: expected a value")
    if odd := [name for name in values if name not in _ALL]:
        close = similar(odd[0], _ALL)
        hint = f" (did you mean --{close[0]}?)" if close else ""
        raise RecipeError(f"{_LINE}: --{odd[0]} is no argument of run_mindformer.py{hint}")
    (config,) = values.pop("config")
    document = parse(read_text(Path(config)), config)
    if not isinstance(document.data, dict):
        raise RecipeError(f"{config}: expected the keys of MindSpore Transformers")
    data: dict[str, Any] = dict(document.data)
    for name in values.keys() & _PLACES.keys():
        *sections, key = _PLACES[name]
        inner = data
        for section in sections:
            copied = dict(inner.get(section) or {})
            inner[section], inner = copied, copied
        inner[key] = _value(name, values[name])
    data |= {name: values[name][0] for name in values if name in _NOTHING}  # said as "not used"
    origins: dict[Keys, str] = {
        _PLACES[name]: f"{_LINE}: --{name}" for name in values if name in _PLACES
    }
    for name, setting in _DATA.items():
        if name in values:
            overrides.insert(0, f"{setting}=[{', '.join(map(_absolute, values[name]))}]")
    named = [f"{_SETTINGS[name]}={values[name][0]}" for name in values if name in _SETTINGS]
    return replace(document, data=data, overrides=origins), [*named, *overrides]


def _value(name: str, values: Sequence[str]) -> object:
    if name == "predict_data":
        return list(values)
    return values[0] if name in _TEXT else parse_argument(values[0], f"{_LINE}: --{name}")


def _absolute(path: str) -> str:
    """A file of this folder: the names of datasets are relative to ``data.dataset_dir``."""
    return str(Path(path).absolute())


def prompts_of(data: Mapping[str, object]) -> list[str]:
    """The texts of ``predict_data``, which is a text, some, or a file of one on each line."""
    given = data.get("predict_data")
    return [str(text) for text in (given if isinstance(given, list) else [given]) if text]
