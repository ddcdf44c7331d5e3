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
from ..model import base_identity
from ..model.base_identity import BaseModel, Record, changed, identify, pinned, some
from ..model.loading import resolve
from ..model.section import ModelSection
from ..storage import files
from ..training.precompute import model_of
from ..training.stage import POLICY, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModels:
    """The models of a run by role, and what the checkpoint it resumes from says of them."""

    saves_base: bool  # whether checkpoints contain what the policy's base becomes
    models: Mapping[str, BaseModel]
    recorded: Record
    checkpoint: Path | None

    @property
    def policy(self) -> BaseModel:
        """The model of the recipe."""
        return self.models[POLICY]

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each model."""
        return {role: base.folder for role, base in self.models.items()}

    def record(self) -> dict[str, bytes]:
        """The file that records the models. Raises ``ModelError`` if one is not what the
        checkpoint was trained with."""
        # Refused, not warned of: nobody reads the warning, and the run is a mixture of two bases.
        now = identify(self.models, self.recorded)
        for role, base in now.items():
            if role in self.recorded and (names := changed(self.recorded[role], base)):
                raise ModelError(self._refusal(role, base.path, names))
        self._compare_adapter(now)
        made = self.policy.folder / base_identity.NEW_WEIGHTS
        more = {made.name: files.read_file(made)} if made.is_file() else {}
        return {base_identity.NAME: base_identity.dump(now), **more}

    def _refusal(self, role: str, path: str, names: list[str]) -> str:
        assert self.checkpoint is not None
        before, step = self.recorded[role].path, self.checkpoint.name
        setting = "model.path" if role == POLICY else f"the {role}"
        key = "model.path" if self.saves_base else "model.adapter"
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


def find_bases(
    model: ModelSection, stage: Stage, checkpoint: Path | None, *, saves_base: bool
) -> BaseModels:
    """The policy's ``model`` and those of the stage; those of a hub at the commit with which the
    run of ``checkpoint`` began. Raises ``ModelError`` if one does not exist."""
    recorded = {} if checkpoint is None else base_identity.read(checkpoint)
    # A branch that has moved on the hub is no reason to refuse: the commit of the run still exists
    # there (docs/decisions/0043).
    section = pinned(model, recorded.get(POLICY))
    if section != model:
        logger.info("model.path: %s at the commit of the run, %s", section.path, section.revision)
    auxiliaries = stage.auxiliary
    is_start_needed = any(auxiliary.model is None for auxiliary in auxiliaries.values())
    has_weights = is_start_needed or not saves_base
    folder = resolve(section)
    models = {POLICY: BaseModel(section, folder, has_weights, section.adapter, is_start_needed)}
    for role, auxiliary in auxiliaries.items():
        if auxiliary.model is not None:
            other = pinned(model_of(auxiliary, model), recorded.get(role))
            models[role] = BaseModel(
                other,
                _resolved(other, role),
                adapter=other.adapter,
                has_adapter_weights=other.adapter is not None,
            )
    return BaseModels(saves_base, models, recorded, checkpoint)


def _resolved(section: ModelSection, role: str) -> Path:
    """The folder of an auxiliary model. Raises ``ModelError``, which names the role."""
    try:
        return resolve(section)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path:", f"the {role}:", 1)) from None
