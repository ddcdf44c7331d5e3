"""What the kinds of PEFT's adapters share, and what is particular to one: ``AdapterMethod``."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from .. import model as models
from ..errors import CheckpointError, RecipeError
from ..network.method import Method
from ..schema import Problem

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

    from ..checkpoint.sources import Shape, TensorSource
    from ..model.lora_targets import Targets
    from ..model.section import ModelSection
    from ..network.method import UnshardedWeights


Part = Literal["tower", "projector", "language"]  # of a model that reads pictures


class AdapterMethod(Method):
    """One kind of adapter, on a base that stays frozen. A kind is one file: its settings, what PEFT
    calls them, what it can adapt, and how it merges. What is here is right for kinds that adapt
    linear layers and no others."""

    saves_base_model: ClassVar[bool] = False
    packages: ClassVar[Sequence[str]] = ("peft",)
    peft_type: ClassVar[str]  # as ``adapter_config.json`` has it
    peft_names: ClassVar[Mapping[str, str]]  # of each setting that PEFT has under another name
    does: ClassVar[str]  # what the kind does to a weight, in errors

    targets: tuple[str, ...]
    parts: tuple[Part, ...]
    modules_to_save: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("targets must name at least one module, or all")
        if not self.parts:
            raise ValueError("parts must name at least one of tower, projector, language")

    @abstractmethod
    def config(self, **shared: Any) -> PeftConfig:
        """PEFT's configuration; ``shared`` are the arguments that every kind has."""

    @classmethod
    def as_lora(
        cls,
        adapter: TensorSource,
        config: Mapping[str, Any],
        weights: Mapping[str, Shape],
    ) -> tuple[TensorSource, Mapping[str, Any]]:
        """The tensors and the configuration of an adapter of this kind as those of a LoRA adapter
        that adds the same to the base, which is how it is merged; ``weights`` are the shapes of the
        adapted weights, by module. Raises ``CheckpointError`` if there is none."""
        raise CheckpointError(
            f"peft_type {cls.peft_type} cannot be merged here: what it does ({cls.does}) is no sum "
            "of the base and a product; merge it with peft's own merge_and_unload()"
        )

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Wrap ``model`` as PEFT does. Raises ``RecipeError`` if a target cannot be adapted."""
        chosen = self.chosen(model)
        modules, _ = models.lora_targets.target_patterns(model, chosen)
        return self.wrapped(model, chosen, self.config(**self.shared(model, modules)))

    def shared(self, model: PreTrainedModel, modules: Sequence[str]) -> dict[str, Any]:
        """The arguments that PEFT's configuration has for every kind."""
        return {
            "target_modules": list(modules),
            "modules_to_save": self.in_full(model) or None,
            "task_type": "CAUSAL_LM",
        }

    def wrapped(self, model: PreTrainedModel, chosen: Targets, config: PeftConfig) -> nn.Module:
        """PEFT's wrapper of ``model``. Raises ``RecipeError`` unless it adapts what was chosen."""
        from peft import get_peft_model

        try:
            with warnings.catch_warnings():  # that it has seen itself how weights are stored
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
                wrapped: nn.Module = get_peft_model(model, config)
        except ValueError as error:
            raise RecipeError(
                f"method.{self.name}: PEFT cannot adapt this model: {error}"
            ) from None
        # In transformers 5 the experts of a mixture are one parameter, and PEFT converts names to
        # it: `gate_proj` then means the experts, and dense layers of that name are dropped. In 18
        # mixtures 53 to 95 % of the weights had no adapter (docs/decisions/0045).
        if other := chosen.all_parameters ^ {*models.weight_matrices.adapted(wrapped)}:
            raise RecipeError(
                f"method.{self.name}: PEFT does not adapt exactly what the recipe names: "
                f"{min(other)}; name other targets, or another version of peft"
            )
        return wrapped

    def continued(self, adapter: Mapping[str, object]) -> Self:
        """With the settings of the adapter."""
        values = {name: adapter.get(peft_name) for name, peft_name in self.peft_names.items()}
        settings: dict[str, Any] = {n: v for n, v in values.items() if isinstance(v, int | float)}
        return replace(self, **settings)  # type: ignore[type-var]

    def attach(
        self, model: PreTrainedModel, attach: Callable[[PreTrainedModel], nn.Module]
    ) -> nn.Module:
        """``model`` with the adapter that ``attach`` reads. Raises ``RecipeError`` if it is another
        kind of adapter, or adapts other layers than the targets."""
        expected = self.chosen(model).all_parameters
        module = attach(model)
        config = self.config_of(module)
        if expected != {*models.weight_matrices.adapted(module)}:
            raise RecipeError(
                f"method.{self.name}.targets: {', '.join(self.targets)}, but model.adapter adapts "
                f"{', '.join(sorted(target_names(vars(config))))}; name these"
            )
        return module

    def config_of(self, module: nn.Module) -> Any:
        """PEFT's configuration of ``module``. Raises ``RecipeError`` if it is of another kind."""
        config: Any = module.peft_config["default"]  # type: ignore[index]
        if config.peft_type != self.peft_type:
            raise RecipeError(
                f"method: {self.name}, but model.adapter is an adapter of another method, "
                f"{config.peft_type}; name that method, or another adapter"
            )
        return config

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """The adapter alone."""
        return models.weights.AdapterWeights(module)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """What no adapter on a frozen base can have. The base may be quantized."""
        if model.float8 is not None:
            yield Problem(
                ("model", "float8"),
                f"method {self.name} trains no linear layer of the model; use method: full or "
                "freeze, or leave it unset",
            )
        if model.frozen_adapters and not self.is_sum:
            yield Problem(
                ("model", "frozen_adapters"),
                f"what {self.name} does ({self.does}) is no sum with other adapters; use "
                "method: lora, or merge them into the model first with `surefoot export`",
            )

    @property
    def is_sum(self) -> bool:
        """Whether frozen adapters may be beside it: all are one LoRA adapter together."""
        return False

    def in_full(self, model: PreTrainedModel) -> list[str]:
        """``modules_to_save`` by names of ``model``. Raises ``RecipeError`` if one is not there."""
        names = models.lora_targets.in_full(model, self.modules_to_save)
        for name in names:
            if not any(f".{module}".endswith(f".{name}") for module, _ in model.named_modules()):
                raise RecipeError(
                    f"method.{self.name}.modules_to_save: no module {name!r} in the model"
                )
        return names

    def chosen(self, model: PreTrainedModel) -> Targets:
        """The targets. Raises ``RecipeError`` unless all of them are linear layers."""
        key = f"method.{self.name}.targets"
        targets = models.lora_targets.choose_targets(
            model, self.targets, self.in_full(model), key, self.parts
        )
        # `all` of a kind that has no form for fused experts is all linear layers.
        if "all" in self.targets:
            targets = replace(targets, parameters=[])
        for name in targets.parameters:
            raise RecipeError(f"{key}: {name} is a parameter, which PEFT cannot adapt so")
        for name in targets.modules:
            if not models.weight_matrices.is_linear(model.get_submodule(name)):
                raise RecipeError(f"{key}: {name} is no linear layer")
        return targets


def target_names(adapter: Mapping[str, object]) -> set[str]:
    """The targets in an adapter's configuration, by names that recipes use."""
    parameters = names_in(adapter.get("target_parameters"))
    modules = names_in(adapter.get("target_modules"))
    return modules | {name.removesuffix(".weight") for name in parameters}


def names_in(value: object) -> set[str]:
    """The names in a value of an adapter's configuration: one, several, or none."""
    if isinstance(value, str):
        return {value}
    return set(map(str, value)) if isinstance(value, Iterable) else set()
