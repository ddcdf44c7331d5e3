"""OFT (arXiv:2306.07280) through PEFT: rotations of the inputs of frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from .. import model as models
from ..errors import RecipeError
from ..model.section import ModelSection
from ..schema import Problem
from .adapter_settings import target_names
from .rules import check_saved, every_name, problems_of_adapters

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..model.lora_targets import Targets
    from ..network.method import UnshardedWeights


@dataclass(frozen=True, kw_only=True)
class OFT:
    """Train a rotation of each block of inputs of chosen linear layers; the base is frozen."""

    saves_base_model: ClassVar[bool] = False
    packages: ClassVar[Sequence[str]] = ("peft",)
    trainable = every_name

    block_size: int = 32
    """Inputs that are rotated together; a divisor of the inputs of every adapted layer."""
    dropout: float = 0.0
    """The share of blocks that are not rotated in a training step."""
    targets: tuple[str, ...] = ("all",)
    """The linear layers to adapt, by the last part of the name; ``all`` is every one except the
    head, routers and experts."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full and save with the adapter, such as ``embed_tokens`` or
    ``lm_head``."""

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not self.targets:
            raise ValueError("targets must name at least one module, or all")

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Wrap ``model`` as PEFT does. Raises ``RecipeError`` if a target cannot be rotated."""
        from peft import OFTConfig, get_peft_model

        check_saved("oft", model, self.modules_to_save)
        chosen = self._chosen(model)
        modules, _ = models.target_patterns(model, chosen)
        config = OFTConfig(
            oft_block_size=self.block_size,
            module_dropout=self.dropout,
            target_modules=modules,
            modules_to_save=list(self.modules_to_save) or None,
            task_type="CAUSAL_LM",
        )
        wrapped: nn.Module = get_peft_model(model, config)
        if other := chosen.all_parameters ^ {*models.adapted(wrapped)}:
            raise RecipeError(
                f"method.oft: PEFT does not adapt exactly what the recipe names: {min(other)}; "
                "name other targets"
            )
        return wrapped

    def continued(self, adapter: Mapping[str, object]) -> OFT:
        """With the settings of the adapter."""
        found: dict[str, Any] = {}
        for name, theirs in (("block_size", "oft_block_size"), ("dropout", "module_dropout")):
            if isinstance(value := adapter.get(theirs), int | float):
                found[name] = value
        return replace(self, **found)

    def attach(
        self, model: PreTrainedModel, attach: Callable[[PreTrainedModel], nn.Module]
    ) -> nn.Module:
        """``model`` with the adapter that ``attach`` reads. Raises ``RecipeError`` if it is another
        kind of adapter, or adapts other layers than the targets."""
        expected = self._chosen(model).all_parameters
        module = attach(model)
        config: Any = module.peft_config["default"]  # type: ignore[index]
        if config.peft_type != "OFT":
            raise RecipeError(
                f"method: oft, but model.adapter is an adapter of another method, "
                f"{config.peft_type}; name that method, or another adapter"
            )
        if expected != {*models.adapted(module)}:
            raise RecipeError(
                f"method.oft.targets: {', '.join(self.targets)}, but model.adapter adapts "
                f"{', '.join(sorted(target_names(vars(config))))}; name these"
            )
        return module

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """The adapter alone."""
        return models.AdapterWeights(module)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """What an adapter on a frozen base cannot have, and frozen adapters, which are sums."""
        yield from problems_of_adapters("oft", model)
        if model.frozen_adapters:
            yield Problem(
                ("model", "frozen_adapters"),
                "a rotation is no sum with other adapters; use method: lora, or merge them into "
                "the model first with `surefoot export`",
            )

    def _chosen(self, model: PreTrainedModel) -> Targets:
        """The targets, all of them linear layers with a whole number of blocks."""
        targets = models.choose_targets(
            model, self.targets, self.modules_to_save, "method.oft.targets"
        )
        if "all" in self.targets:
            targets = replace(targets, parameters=[])
        for name in targets.parameters:
            raise RecipeError(
                f"method.oft.targets: {name} is a parameter, which PEFT cannot rotate"
            )
        for name in targets.modules:
            layer: Any = model.get_submodule(name)
            if not models.is_linear(layer):
                raise RecipeError(f"method.oft.targets: {name} is no linear layer")
            inputs = getattr(layer, "in_features", None) or layer.weight.shape[0]
            if inputs % self.block_size:
                raise RecipeError(
                    f"method.oft.block_size: {self.block_size}, but {name} has {inputs} inputs; "
                    "choose a divisor of the inputs of every layer"
                )
        return targets
