"""``Method``: which parameters are trained, and how; ``Weights``: what files contain of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from .. import model as models
from ..checkpoint.state.roles import ShardedState
from ..optim.blocks import ParameterNames, TrainedBlocks, everything
from ..schema import Problem

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PreTrainedModel

    from ..checkpoint.disk.manifest import Kind
    from ..model.section import ModelSection
    from ..parallel.sharding import Cuts


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


class Method(ABC):
    """One way of tuning weights: what differs from here. Its fields are its settings in the recipe.

    Without more, it trains the model's own weights, all that ``apply`` leaves trainable.
    """

    name: ClassVar[str]  # as recipes call it
    saves_base_model: ClassVar[bool] = True  # whether checkpoints contain the weights of the model
    packages: ClassVar[Sequence[str]] = ()  # Python packages that ``apply`` imports

    @abstractmethod
    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Make the model ready to train: freeze, wrap, or leave unchanged. Parameters that require
        gradients afterwards may be trained at some step."""

    def continued(self, adapter: Mapping[str, object]) -> Method:
        """The method with the settings of an adapter whose training it continues: the content of
        ``adapter_config.json``."""
        return self

    def attach(
        self, model: PreTrainedModel, attach: Callable[[PreTrainedModel], nn.Module]
    ) -> nn.Module:
        """``model`` with the adapter to continue, which ``attach`` reads. Raises ``RecipeError`` if
        it has other targets than the method."""
        return attach(model)

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """What files contain of ``module``, the result of ``apply``; ``inner`` is what it wraps."""
        return models.weights.FullWeights(inner)

    def trainable(self, names: ParameterNames, seed: int) -> TrainedBlocks:
        """Which of the parameters that may be trained each update changes. A pure function of the
        step, so no checkpoint contains it; the optimizer is rebuilt when its answer changes."""
        return everything(names)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """Settings of the recipe's model section that this method does not support: adapters, and
        quantized or float16 weights, which are not trained themselves."""
        instead = "use method: lora, or merge {} into the model first with `surefoot export`"
        trains = "trains the weights themselves; use method: lora, or leave it unset"
        refused = (
            ("adapter", model.adapter, f"does not train adapters; {instead.format('it')}"),
            (
                "frozen_adapters",
                model.frozen_adapters,
                f"trains the weights themselves; {instead.format('them')}",
            ),
            ("quantization_bit", model.quantization_bit, trains),
        )
        for name, value, why in refused:
            if value:
                yield Problem(("model", name), f"method {self.name} {why}")
        if model.dtype == "float16":  # in which the optimizer's epsilon is 0, small updates vanish
            yield Problem(
                ("model", "dtype"),
                "trainable weights cannot be float16; use auto (and train.precision: fp16)",
            )
