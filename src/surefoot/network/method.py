"""The protocols ``Method``, which parameters are trained, and ``Weights``, what files contain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..checkpoint.state.protocols import ShardedState

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PreTrainedModel

    from ..checkpoint.disk.manifest import Kind
    from ..model.section import ModelSection
    from ..optim.blocks import ParameterNames, TrainedBlocks
    from ..parallel.sharding import Cuts
    from ..schema import Problem


class Weights(ShardedState, Protocol):
    """What the files of a checkpoint contain of a network; the ``model`` of its states."""

    @property
    def kind(self) -> Kind:
        """What the manifest of such a checkpoint says it is of."""

    @property
    def is_adapter(self) -> bool:
        """Whether the files contain an adapter, not a model."""

    @property
    def is_converted(self) -> bool:
        """Whether the files have other names or shapes than the modules."""

    def small_files(
        self, section: ModelSection, folder: Path | None, stop_token_ids: Sequence[int]
    ) -> dict[str, bytes]:
        """The configuration files beside the weights, for a base model that the recipe names as
        ``section``, and that was loaded from ``folder``."""


class UnshardedWeights(Weights, Protocol):
    """The same before anything is sharded over ranks."""

    def without(self, names: Collection[str], /) -> UnshardedWeights:
        """The weights except the parameters ``names``, which have a file of their own."""

    def sharded(self, cuts: Mapping[str, Cuts]) -> Weights:
        """The weights after their tensors were sharded over ranks."""


class Method(Protocol):
    """One way of tuning weights. Its fields are its settings in the recipe. Nothing is optional."""

    @property
    def saves_base_model(self) -> bool:
        """Whether its checkpoints contain every weight of the model, frozen ones included."""

    @property
    def packages(self) -> Sequence[str]:
        """Python packages that ``apply`` imports."""

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Make the model ready to train: freeze, wrap, or leave unchanged. Parameters that require
        gradients afterwards may be trained at some step."""

    def continued(self, adapter: Mapping[str, object]) -> Method:
        """The method with the settings of an adapter whose training it continues: the content of
        ``adapter_config.json``."""

    def attach(
        self, model: PreTrainedModel, attach: Callable[[PreTrainedModel], nn.Module]
    ) -> nn.Module:
        """``model`` with the adapter to continue, which ``attach`` reads. Raises ``RecipeError`` if
        it has other targets than the method."""

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """What files contain of ``module``, the result of ``apply``; ``inner`` is what it wraps."""

    def trainable(self, names: ParameterNames, seed: int) -> TrainedBlocks:
        """Which of the parameters that may be trained each update changes. A pure function of the
        step, so no checkpoint contains it; the optimizer is rebuilt when its answer changes."""

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """Settings of the recipe's model section that this method does not support."""
