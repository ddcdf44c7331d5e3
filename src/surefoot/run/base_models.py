"""The models that a run stands on: found as when it began, and refused if they have changed.

These are the base of an adapter, and the models of auxiliary roles such as a reference. Of a model
whose weights are in every checkpoint only the configuration counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..model.pretrained import base_identity
from ..model.pretrained.base_identity import BaseModel, Record, changed, identify, pinned, some
from ..model.pretrained.loading import resolve
from ..recipe.recipe import Recipe
from ..training.precompute import model_of
from ..training.stage import POLICY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModels:
    """The models of a run by role, and what the checkpoint it resumes from says of them."""

    recipe: Recipe
    models: Mapping[str, BaseModel]
    known: Record
    checkpoint: Path | None

    @property
    def policy(self) -> BaseModel:
        """The model of the recipe."""
        return self.models[POLICY]

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each model."""
        return {role: one.folder for role, one in self.models.items()}

    def record(self) -> dict[str, bytes]:
        """The file that records the models. Raises ``ModelError`` if one is not what the
        checkpoint was trained with."""
        now = identify(self.models, self.known)
        for role, one in now.items():
            if role in self.known and (names := changed(self.known[role], one)):
                raise ModelError(self._refusal(role, one.path, names))
        self._compare_adapter(now)
        return {base_identity.NAME: base_identity.dump(now)}

    def _refusal(self, role: str, path: str, names: list[str]) -> str:
        assert self.checkpoint is not None
        before, step = self.known[role].path, self.checkpoint.name
        setting = "model.path" if role == POLICY else f"the {role}"
        key = "model.path" if self.recipe.method.saves_base_model else "model.adapter"
        other = f"or start a new run from its weights ({key}={self.checkpoint})"
        if path != before:
            return (
                f"{setting}: {path} is another model than that of {step}, {before}, with other "
                f"files ({some(names)}); name that one, {other}"
            )
        return (
            f"{setting}: {before} has changed since {step} was saved ({some(names)}), and this "
            f"run was trained with the former files; restore them, {other}"
        )

    def _compare_adapter(self, now: Record) -> None:
        """Warn if the run starts from an adapter that was trained on another base."""
        adapter = self.policy.adapter
        if adapter is None or self.checkpoint is not None:
            return
        if (before := base_identity.read(adapter).get(POLICY)) is None:
            return
        if names := [n for n in changed(before, now[POLICY]) if n in before.files]:
            logger.warning(
                "model.adapter: %s was trained on other files of its base than those in %s (%s)",
                adapter,
                self.policy.folder,
                some(names),
            )


def find_bases(recipe: Recipe, checkpoint: Path | None) -> BaseModels:
    """The models of ``recipe``; those of a hub at the commit with which the run of ``checkpoint``
    began. Raises ``ModelError`` if one does not exist."""
    known = {} if checkpoint is None else base_identity.read(checkpoint)
    section = pinned(recipe.model, known.get(POLICY))
    if section != recipe.model:
        logger.info("model.path: %s at the commit of the run, %s", section.path, section.revision)
    auxiliary = recipe.stage.auxiliary
    is_start_needed = any(one.model is None for one in auxiliary.values())
    has_weights = is_start_needed or not recipe.method.saves_base_model
    folder = resolve(section)
    found = {POLICY: BaseModel(section, folder, has_weights, section.adapter, is_start_needed)}
    for role, one in auxiliary.items():
        if one.model is not None:
            other = pinned(model_of(one, recipe.model), known.get(role))
            found[role] = BaseModel(other, resolve(other), adapter=other.adapter)
    return BaseModels(recipe, found, known, checkpoint)
