"""Continue training an adapter: a method that starts from the one in a folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from ..model.pretrained.adapter import continue_adapter
from ..model.section import ModelSection
from ..network.method import Method, UnshardedWeights
from ..schema import Problem


@dataclass(frozen=True)
class Continued:
    """``method``, but of the adapter in ``folder`` rather than of a new one."""

    method: Method
    folder: Path

    @property
    def saves_base_model(self) -> bool:
        """As ``method``."""
        return self.method.saves_base_model

    @property
    def packages(self) -> Sequence[str]:
        """As ``method``."""
        return self.method.packages

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """The model with the adapter; errors as ``continue_adapter``."""
        return continue_adapter(model, self.folder)

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """As ``method``."""
        return self.method.weights(module, inner)

    def trainable(self, step: int, names: Sequence[str]) -> Collection[str]:
        """As ``method``."""
        return self.method.trainable(step, names)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """As ``method``."""
        return self.method.problems(model)


def continued(method: Method, adapter: Path | None) -> Method:
    """``method``, starting from the folder ``adapter`` if one is given."""
    return method if adapter is None else Continued(method, adapter)
