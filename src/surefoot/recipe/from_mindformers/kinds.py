"""Whether a YAML file is MindSpore Transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...schema import Problem, settings
from ..document import Document
from ..other_yaml import MINDFORMERS, refuse_v1
from ..recipe import Recipe


def check_kind(document: Document) -> None:
    """Raises ``RecipeError``: the file is not MindSpore Transformers', with what it is instead."""
    refuse_v1(document)
    told = document.data
    if not isinstance(told, dict) or any(key in told for key in MINDFORMERS):
        return  # what is no mapping is reported when its keys are read
    if problems := list(_problems(told)):
        raise document.error(problems)


def _problems(told: Mapping[str, Any]) -> Iterator[Problem]:
    if {"model", "data", "train"} & told.keys() <= settings(Recipe).keys() and "stage" in told:
        yield Problem(
            (), "this is a recipe already; `surefoot recipe show` prints all its settings"
        )
    else:
        known = ", ".join(MINDFORMERS[:5])
        yield Problem(
            (),
            "neither LLaMA-Factory's YAML, which has model_name_or_path, nor MindSpore "
            f"Transformers': it has none of the keys {known}",
        )
