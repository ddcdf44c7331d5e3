"""YAML files that are no recipes: those of MindSpore Transformers, which are converted first."""

from __future__ import annotations

from ..schema import Problem
from .document import Document

# At least one of these is in every file of MindSpore Transformers that runs anything.
MINDFORMERS = (
    *("run_mode", "runner_config", "runner_wrapper", "parallel_config", "train_dataset"),
    *("load_ckpt_format", "auto_trans_ckpt", "pretrained_model_dir", "use_parallel"),
)


def check_recipe(document: Document) -> None:
    """Raises ``RecipeError``: the file is not a recipe but another program's, with what to do."""
    found = document.data
    if not isinstance(found, dict) or {"model", "data", "train"} <= found.keys():
        return
    if "stage" not in found and any(key in found for key in MINDFORMERS):
        message = (
            "this is MindSpore Transformers' YAML; `surefoot recipe convert` prints it as a recipe"
        )
        raise document.error([Problem((), message)])
