"""The section ``data``."""

from __future__ import annotations

import difflib
from pathlib import Path

from ..arguments import RefusedError
from ..given import GivenArguments, Settings
from ..templates import TEMPLATES, same_template, thinks

ONLINE, REMOTE = "ONLINE", "REMOTE:"
SAVED = ("dataset_dict.json", "state.json")  # of a dataset that LLaMA-Factory has tokenized


def _datasets(given: GivenArguments) -> Settings:
    """Names of ``dataset_info.json``, or hub ids."""
    names, held = given["dataset"], given["eval_dataset"]
    if not names and given["tokenized_path"]:
        message = "is missing; name the datasets, as the tokens in tokenized_path are not read"
        raise RefusedError("dataset", message)
    if not names and given["do_train"]:
        raise RefusedError("dataset", "is missing, and there is nothing to train on")
    found: Settings = {"data.datasets": names or held or []}
    if given["stage"] == "pt":
        found["data.text_unit"] = "line"  # as their reader of .txt files has it
    if held:
        found["data.eval_datasets"] = held
    if given.is_on("USE_MODELSCOPE_HUB"):
        found["data.hub"] = "modelscope"
    return found


def _folder(given: GivenArguments) -> Settings:
    folder = given["dataset_dir"]
    if str(folder).startswith(REMOTE):
        repository = str(folder).removeprefix(REMOTE)
        raise RefusedError(
            "dataset_dir",
            f"{folder!r} is a folder on a hub; download it: `hf download {repository} "
            "--repo-type dataset --local-dir data`, and write dataset_dir: data",
        )
    if folder == ONLINE:
        wrong = [n for n in (given["dataset"] or ()) if "/" not in n]
        if wrong:
            message = f"{wrong[0]!r} is no hub id, as dataset_dir is ONLINE; write owner/name"
            raise RefusedError("dataset", message)
        return {}
    return {"data.dataset_dir": folder}


def _template(given: GivenArguments) -> Settings:
    """The template of the same name, with their default system message."""
    name = given["template"]
    if name is None or given["stage"] == "pt":
        return {}
    if name not in TEMPLATES:
        near = difflib.get_close_matches(name, TEMPLATES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise RefusedError("template", f"{name!r} is no template of LLaMA-Factory{hint}")
    bundled, system = same_template(name)
    found: Settings = {"data.template": bundled}
    if system is not None and not given.sets("default_system"):
        found["data.default_system"] = system
    return found


def _thinking(given: GivenArguments) -> Settings:
    """Thoughts of a template that has them: they train on those of all turns, or of the last."""
    if not thinks(given["template"]) or given["stage"] == "pt":
        return {}
    is_on = given["enable_thinking"]
    found: Settings = {"data.enable_thinking": is_on is not False}
    if is_on is None:
        found["data.train_on_thoughts"] = "written"
    if given["preserve_thinking"] or not given["mask_history"]:
        found["data.preserve_thinking"] = True
    return found


def _shuffle(given: GivenArguments) -> Settings:
    in_order = given["disable_shuffling"] or given["train_sampling_strategy"] == "sequential"
    return {"data.shuffle": False} if in_order else {}


def _samples(given: GivenArguments) -> Settings:
    """What they refuse, too."""
    if given["streaming"] and given["max_samples"] is not None:
        message = "excludes streaming; remove one of the two"
        raise RefusedError("max_samples", message)
    return {}


def _mixing(given: GivenArguments) -> Settings:
    """One dataset is not mixed, whatever the strategy."""
    names, probabilities = given["dataset"] or (), given["interleave_probs"]
    if probabilities is not None and given["mix_strategy"] == "concat":
        message = "is only read with a mix_strategy that interleaves; remove it"
        raise RefusedError("interleave_probs", message)
    if len(names) < 2 or given["mix_strategy"] == "concat":
        return {}
    found: Settings = {"data.mix_strategy": given["mix_strategy"]}
    if probabilities is not None:
        found["data.interleave_probs"] = [_number(each) for each in probabilities]
    return found


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        message = f"expected numbers, got {value!r}"
        raise RefusedError("interleave_probs", message) from None


def _tokenized(given: GivenArguments) -> Settings:
    """The folder for encoded data, unless LLaMA-Factory has written to it."""
    folder = given["tokenized_path"]
    if folder is None or any((Path(folder) / name).exists() for name in SAVED):
        return {}
    return {"data.cache_dir": folder}


DATA = (
    ("dataset", _datasets),
    ("dataset_dir", _folder),
    ("template", _template),
    ("enable_thinking", _thinking),
    ("disable_shuffling", _shuffle),
    ("max_samples", _samples),
    ("interleave_probs", _mixing),
    ("tokenized_path", _tokenized),
)
