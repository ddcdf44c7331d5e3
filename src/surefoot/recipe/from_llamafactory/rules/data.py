"""The section ``data``."""

from __future__ import annotations

import difflib

from ..arguments.argument import RefusedArgumentError
from ..given import GivenArguments, Settings
from ..templates import SAME, TEMPLATES

ONLINE, REMOTE = "ONLINE", "REMOTE:"


def _datasets(given: GivenArguments) -> Settings:
    """Names of ``dataset_info.json``, or hub ids."""
    names, held = given["dataset"], given["eval_dataset"]
    if not names and given["do_train"]:
        raise RefusedArgumentError("dataset", "is missing, and there is nothing to train on")
    found: Settings = {"data.datasets": names or held or []}
    if held:
        found["data.eval_datasets"] = held
    if given.is_on("USE_MODELSCOPE_HUB"):
        found["data.hub"] = "modelscope"
    return found


def _folder(given: GivenArguments) -> Settings:
    folder = given["dataset_dir"]
    if str(folder).startswith(REMOTE):
        repository = str(folder).removeprefix(REMOTE)
        raise RefusedArgumentError(
            "dataset_dir",
            f"{folder!r} is a folder on a hub; download it: `hf download {repository} "
            "--repo-type dataset --local-dir data`, and write dataset_dir: data",
        )
    if folder == ONLINE:
        wrong = [n for n in (given["dataset"] or ()) if "/" not in n]
        if wrong:
            message = f"{wrong[0]!r} is no hub id, as dataset_dir is ONLINE; write owner/name"
            raise RefusedArgumentError("dataset", message)
        return {}
    return {"data.dataset_dir": folder}


def _template(given: GivenArguments) -> Settings:
    """A bundled template of the same tokens, or the model's own."""
    name = given["template"]
    if name is None or given["stage"] == "pt":
        return {}
    if name not in TEMPLATES:
        near = difflib.get_close_matches(name, TEMPLATES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise RefusedArgumentError("template", f"{name!r} is no template of LLaMA-Factory{hint}")
    bundled, system = SAME.get(name, ("auto", None))
    found: Settings = {"data.template": bundled}
    if system is not None and not given.sets("default_system"):
        found["data.default_system"] = system
    return found


def _shuffle(given: GivenArguments) -> Settings:
    in_order = given["disable_shuffling"] or given["train_sampling_strategy"] == "sequential"
    return {"data.shuffle": False} if in_order else {}


def _samples(given: GivenArguments) -> Settings:
    """What they refuse, too."""
    if given["streaming"] and given["max_samples"] is not None:
        message = "excludes streaming; remove one of the two"
        raise RefusedArgumentError("max_samples", message)
    return {}


DATA = (
    ("dataset", _datasets),
    ("dataset_dir", _folder),
    ("template", _template),
    ("disable_shuffling", _shuffle),
    ("max_samples", _samples),
)
